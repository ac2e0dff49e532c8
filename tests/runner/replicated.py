"""Two coordinators on one etcd, and agents, as processes of their own that a test may kill."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from agents import AGENT, DEADLINE_S

TOKEN = "a-token-for-this-test-only"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # with the Python of these tests


class Process(subprocess.Popen[str]):
    """One whose first line of output says that it serves."""

    def __init__(self, *command: str, log: IO[str] | int = subprocess.DEVNULL) -> None:
        super().__init__(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "HOROVOD_TOKEN": TOKEN, "PATH": PATH},
        )
        assert self.stdout is not None
        self.first = self.stdout.readline().strip()
        assert self.first, command


@dataclass
class Replicated:
    """The first coordinator serves agents and jobs. `log` is what both have said."""

    folder: Path
    coordinators: list[Process] = field(default_factory=list)
    agents: dict[str, Process] = field(default_factory=dict)

    @property
    def log(self) -> str:
        return (self.folder / "coordinators.log").read_text()

    @property
    def addresses(self) -> str:
        return ",".join(one.first.rpartition(" ")[2] for one in self.coordinators)

    def start_agent(self, name: str, slots: int, *options: str) -> None:
        """Returns when it is registered."""
        state = str(self.folder / name)
        options = ("--name", name, "--slots", str(slots), "--state-dir", state, *options)
        self.agents[name] = Process(*AGENT, "--coordinator", self.addresses, *options)

    def kill_first(self) -> None:
        """The coordinator that serves agents and jobs."""
        self.coordinators[0].kill()
        self.coordinators[0].wait()


@contextlib.contextmanager
def replicated(store: str, folder: Path, has_token: bool = True) -> Iterator[Replicated]:
    """store: the URL of an etcd. has_token: else everybody is served, and what stands in etcd is not sealed."""
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    access = ["--token-file", str(token)] if has_token else ["--insecure"]
    command = [sys.executable, "-m", "horovod.coordinator", "--listen", "127.0.0.1:0", *access]
    found = Replicated(folder)
    try:
        with (folder / "coordinators.log").open("w") as log:
            for _ in range(2):
                found.coordinators.append(Process(*command, "--store", store, log=log))
        yield found
    finally:
        for process in (*found.agents.values(), *found.coordinators):
            process.terminate()
        for process in (*found.agents.values(), *found.coordinators):
            process.communicate(timeout=DEADLINE_S)
