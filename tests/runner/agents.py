"""A coordinator and agents of several hosts on this one, for tests: real processes on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from event_words import AGENT_SERVES

from horovod.coordinator.config import Limits
from horovod.coordinator.server import EmbeddedCoordinator

AGENT = [sys.executable, "-m", "horovod.worker.agent"]
DEADLINE_S = 60


class CoordinatorProcess:
    """As an EmbeddedCoordinator, but a process of its own: for tests that measure or kill it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.token = "secret-of-this-test"
        self.process: subprocess.Popen[str] | None = None
        self._options = options
        self._address = "127.0.0.1:0"
        self._token_file = folder / "coordinator.token"

    @property
    def address(self) -> str:
        return self._address

    def start(self) -> None:
        """Returns when it listens: for a second time where it did."""
        self._token_file.write_text(self.token)
        self._token_file.chmod(0o600)
        command = [sys.executable, "-m", "horovod.coordinator", "--listen", self._address]
        self.process = subprocess.Popen(
            [*command, "--token-file", str(self._token_file), *self._options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self._address = self.process.stdout.readline().strip().rpartition(" ")[2]
        assert self._address, "the coordinator did not start"

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.communicate(timeout=DEADLINE_S)


class Agents:
    """`with Agents(tmp_path) as agents: agents.add("h1")`. Nothing is left at the end, whatever a test does."""

    def __init__(
        self,
        folder: Path,
        limits: Limits = Limits(),  # noqa: B008 - a frozen value
        coordinator: CoordinatorProcess | EmbeddedCoordinator | None = None,
    ) -> None:
        self.folder = folder
        self.coordinator = coordinator or EmbeddedCoordinator(token="secret-of-this-test", limits=limits)
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Agents:
        self.coordinator.start()
        return self

    def __exit__(self, *_: object) -> None:
        families = []
        for process in self.processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                families += psutil.Process(process.pid).children(recursive=True)
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in self.processes.values():
            try:
                process.communicate(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        for one in families:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self.coordinator.stop()

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "HOROVOD_TOKEN": self.coordinator.token or ""}

    def add(self, name: str, slots: int = 2, *options: str) -> subprocess.Popen[str]:
        """Starts the agent of a host; returns when it is registered."""
        command = [*AGENT, "--coordinator", self.coordinator.address, "--name", name, "--slots", str(slots)]
        process = self.processes[name] = subprocess.Popen(
            [*command, "--state-dir", str(self.folder / name), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environ,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == f"{AGENT_SERVES} {slots} slots as {name}\n", process.communicate()[1]
        return process

    @property
    def options(self) -> list[str]:
        """Of a launcher that is to use these agents."""
        return ["--coordinator", self.coordinator.address]
