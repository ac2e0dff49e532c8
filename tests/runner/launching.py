"""A launcher as tests hold it: started as a process, read line by line, with an eye on everything below it.

It is forked from a process that has imported what it needs (preloaded_launchers.py), which is most of its processor
time; tests of how a process starts, or that need it as a child, use LAUNCHER, the command.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import fork_server
import psutil

LAUNCHER = [sys.executable, "-m", "horovod.launch"]
DEADLINE_S = 60
# The begin of a program without a framework, whose ranks call step(NAME). It stands behind the fixture `program`'s own.
STEPS = f"""
sys.path.insert(0, {str(Path(__file__).parents[1] / "runtime")!r})
import numpy as np
from numpy_framework import OPS, global_process_set, hvd
from horovod.worker.runtime import context
member = context.init()
def step(name):
    total = OPS.allreduce(np.full(1, rank + 1.0), hvd.Sum, name, 1.0, 1.0, global_process_set)
    print(name, int(total[0]), flush=True)
step("before")
"""


def shared_memory() -> set[str]:
    """Our names in /dev/shm; other programs and tests come and go there."""
    folder = Path("/dev/shm")
    return {entry.name for entry in folder.iterdir() if "horovod" in entry.name} if folder.is_dir() else set()


def still_alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that live on after a wait; a zombie does not live. psutil knows a reused number by its start time."""
    return [process for process in processes if not _ends(process)]


def _ends(process: psutil.Process) -> bool:
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        return not process.is_running() or bool(select.select([descriptor], [], [], DEADLINE_S)[0])
    finally:
        os.close(descriptor)


class ForkedLauncher:
    """A forked launcher, with what tests use of subprocess.Popen. `graces` are arguments of its Supervisor."""

    def __init__(
        self, *arguments: str, environ: dict[str, str] | None = None, graces: dict[str, float] | None = None
    ) -> None:
        null = os.open(os.devnull, os.O_RDONLY)
        (out, their_out), (err, their_err) = os.pipe(), os.pipe()
        self.stdout = os.fdopen(out)
        self.stderr = os.fdopen(err)
        self.returncode: int | None = None
        theirs = [null, their_out, their_err]
        try:
            self._forked = fork_server.shared("preloaded_launchers").start(
                {**os.environ, **(environ or {})}, theirs, list(arguments), os.getcwd(), graces or {}
            )
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self.pid = self._forked.pid

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float) -> int:
        if self._wait(timeout) is None:
            raise subprocess.TimeoutExpired(LAUNCHER, timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        self._forked.send_signal(signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = DEADLINE_S) -> tuple[str, str]:
        """The rest of stdout and stderr, after the end of both and of the process."""
        texts = ["", ""]

        def read(number: int) -> None:
            texts[number] = (self.stdout, self.stderr)[number].read()

        readers = [
            threading.Thread(target=read, args=(number,), daemon=True)
            for number, stream in enumerate((self.stdout, self.stderr))
            if not stream.closed
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(LAUNCHER, timeout)
        self.wait(timeout)
        self.stdout.close()
        self.stderr.close()
        return texts[0], texts[1]

    def _wait(self, timeout_s: float) -> int | None:
        if self.returncode is None:
            self.returncode = self._forked.wait(timeout_s)
        return self.returncode


def run_launcher(
    *arguments: str, environ: dict[str, str] | None = None, graces: dict[str, float] | None = None
) -> subprocess.CompletedProcess[str]:
    """A forked launcher, run to its end."""
    process = ForkedLauncher(*arguments, environ=environ, graces=graces)
    try:
        out, err = process.communicate()
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess([*LAUNCHER, *arguments], process.returncode, out, err)


class Launched:
    """A launcher that runs. `line` waits for its output, so that tests wait for events and not for time.

    child: it is a child of this process, in a session of its own, and not forked.
    """

    def __init__(
        self,
        *arguments: str,
        environ: dict[str, str] | None = None,
        graces: dict[str, float] | None = None,
        child: bool = False,
    ) -> None:
        self.process: subprocess.Popen[str] | ForkedLauncher
        if child:
            self.process = subprocess.Popen(
                [*LAUNCHER, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **(environ or {})},
                start_new_session=True,
            )
        else:
            self.process = ForkedLauncher(*arguments, environ=environ, graces=graces)
        self.seen: list[psutil.Process] = []

    def lines(self, count: int) -> list[str]:
        """The next `count` lines of stdout."""
        assert self.process.stdout is not None
        found = [self.process.stdout.readline() for _ in range(count)]
        assert all(found), f"the launcher ended early: {self.process.communicate()}"
        return [line.rstrip("\n") for line in found]

    def remember_family(self) -> list[psutil.Process]:
        """Everything below the launcher now: guardian, ranks, grandchildren."""
        self.seen = psutil.Process(self.process.pid).children(recursive=True)
        return self.seen

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def finish(self) -> tuple[int, str, str]:
        """Waits for the end: exit code, rest of stdout, stderr."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode is not None
        return self.process.returncode, out, err

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.wait(DEADLINE_S)
        for process in still_alive(self.seen) if self.seen else []:
            process.kill()
