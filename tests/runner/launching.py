"""A launcher as tests hold it: started as a process, read line by line, with an eye on everything below it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import psutil

LAUNCHER = [sys.executable, "-m", "horovod.runner.launch"]
DEADLINE_S = 60


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


class Launched:
    """A launcher that runs. `line` waits for its output, so that tests wait for events and not for time."""

    def __init__(self, *arguments: str, environ: dict[str, str] | None = None, new_session: bool = False) -> None:
        self.process = subprocess.Popen(
            [*LAUNCHER, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environ or {})},
            start_new_session=new_session,
        )
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
        return self.process.returncode, out, err

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        for process in still_alive(self.seen) if self.seen else []:
            process.kill()
