"""Coordinators, agents, launchers and ranks of releases that differ: who works with whom, and what both sides say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import AGENT, DEADLINE_S
from event_words import AGENT_SERVES
from other_release import install
from resources import eventually

from benchmarks.ports import free_ports
from horovod.base.errors import ClusterCode, ErrorCode, WorldCode
from horovod.base.protocol import PROTOCOL_VERSION, __version__

TOKEN = "secret-of-this-test"
LATER, NEXT = "1.97.3", "2.98.4"
# Its release, and that all of its world have it.
RANK = """
import sys
from horovod.base.protocol import __version__
from horovod.base.settings import resolve
from horovod.worker.runtime.epoch import begin, end

context = begin(resolve({}, {"coordinator": sys.argv[1], "token": sys.argv[2], "size": 2, "job": sys.argv[3]}))
print("world of", context.world.size, "with", __version__)
end(context)
"""


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another release with our protocol."""
    return install(tmp_path_factory.mktemp("later"), LATER)


@pytest.fixture(scope="module")
def next_major(tmp_path_factory: pytest.TempPathFactory) -> str:
    return install(tmp_path_factory.mktemp("next"), NEXT, PROTOCOL_VERSION + 1)


class Coordinator:
    def __init__(self, python: str, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self._log = folder / "coordinator.log"
        token_file = folder / "token"
        token_file.write_text(TOKEN)
        token_file.chmod(0o600)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", "horovod.coordinator", "--listen", self.address, "--token-file", str(token_file),
                 "--verbose"],
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        assert self.address in self._process.stdout.readline(), self.log()

    def log(self) -> str:
        return self._log.read_text()

    def stop(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[Coordinator]:
    coordinator = Coordinator(sys.executable, tmp_path)
    yield coordinator
    coordinator.stop()


@pytest.fixture
def theirs(later: str, tmp_path: Path) -> Iterator[Coordinator]:
    coordinator = Coordinator(later, tmp_path)
    yield coordinator
    coordinator.stop()


class Processes:
    """What a test has started, and ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: list[subprocess.Popen[str]] = []

    def start(self, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=self._folder, env={"PATH": "/usr/bin:/bin", "HOME": str(self._folder), "HOROVOD_TOKEN": TOKEN},
        )  # fmt: skip
        self._all.append(process)
        return process

    def rank(self, python: str, coordinator: Coordinator, job: str = "j") -> subprocess.Popen[str]:
        return self.start(python, "-c", RANK, coordinator.address, TOKEN, job)

    def agent(self, python: str, coordinator: Coordinator, name: str) -> subprocess.Popen[str]:
        return self.start(
            python, *AGENT[1:], "--coordinator", coordinator.address, "--name", name, "--slots", "2",
            "--state-dir", str(self._folder / name),
        )  # fmt: skip

    def launcher(self, python: str, coordinator: Coordinator, *arguments: str) -> subprocess.Popen[str]:
        command, *more = arguments
        return self.start(python, "-m", "horovod.launch", command, "--coordinator", coordinator.address, *more)

    def end(self) -> None:
        for process in self._all:
            process.terminate()
        for process in self._all:
            try:
                process.communicate(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.end()


def said(process: subprocess.Popen[str]) -> str:
    """Of a process that fails."""
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode != 0, out
    return err


def check_told(text: str, code: ErrorCode, *versions: str) -> None:
    """One sentence has the code and the versions."""
    lines = [line for line in text.splitlines() if f"[{code}]" in line]
    assert lines, text
    assert any(all(version in line for version in versions) for line in lines), lines


def test_ranks_of_one_world_have_one_release(ours: Coordinator, later: str, processes: Processes) -> None:
    first = processes.rank(sys.executable, ours)
    assert eventually(lambda: "1 of 2 members" in ours.log(), DEADLINE_S), ours.log()
    check_told(said(processes.rank(later, ours)), WorldCode.OTHER_VERSION, __version__, LATER)
    check_told(ours.log(), WorldCode.OTHER_VERSION, __version__, LATER)
    assert processes.rank(sys.executable, ours).communicate(timeout=DEADLINE_S)[0].startswith("world of 2")
    out, err = first.communicate(timeout=DEADLINE_S)
    assert out == f"world of 2 with {__version__}\n"
    assert LATER in err, "the one that waited was told, too"


@pytest.mark.parametrize("who", ["older", "newer"])
def test_a_coordinator_of_another_release_serves_worlds_agents_and_launchers(
    who: str, ours: Coordinator, theirs: Coordinator, later: str, processes: Processes
) -> None:
    coordinator, python, version = (ours, later, LATER) if who == "older" else (theirs, sys.executable, __version__)
    ranks = [processes.rank(python, coordinator) for _ in range(2)]
    for rank in ranks:
        assert rank.communicate(timeout=DEADLINE_S)[0] == f"world of 2 with {version}\n"
    agent = processes.agent(python, coordinator, "h1")
    assert agent.stdout is not None
    assert agent.stdout.readline().startswith(AGENT_SERVES)
    assert eventually(lambda: f"The agent of host h1 has Horovod {version}" in coordinator.log(), DEADLINE_S)
    launcher = processes.launcher(python, coordinator, "ps")
    out, err = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, err
    assert "h1" in out


def test_another_protocol_is_refused_with_both_releases(
    ours: Coordinator, next_major: str, processes: Processes
) -> None:
    """By the coordinator, to whichever side is the newer one."""
    rank, agent = processes.rank(next_major, ours), processes.agent(next_major, ours, "h1")
    launcher = processes.launcher(next_major, ours, "ps")
    for process, code in (
        (rank, WorldCode.OTHER_VERSION),
        (agent, ClusterCode.AGENT_VERSION),
        (launcher, ClusterCode.LAUNCHER_VERSION),
    ):
        check_told(said(process), code, NEXT, __version__)
        check_told(ours.log(), code, NEXT, __version__)
