"""Jobs on registered agents when something is wrong with a host: it dies while the job starts, its disk is full, its
ranks do not end, its clock jumps."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from agents import Agents
from error_codes import ends_with
from launching import Launched, still_alive
from resources import eventually

from horovod.base.errors import LaunchCode
from horovod.coordinator.config import Limits

Launch = Callable[..., Launched]
Program = Callable[[str], list[str]]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with Agents(tmp_path, Limits(reattach_grace_s=2.0)) as agents:
        yield agents


def ranks_of(launched: Launched, count: int) -> list[psutil.Process]:
    """Ranks print their number first."""
    return [psutil.Process(int(line.partition(":")[2])) for line in launched.lines(count)]


def test_a_rank_that_ignores_sigterm_gets_sigkill(agents: Agents, launch: Launch, program: Program) -> None:
    """Beside one that fails: 3 s to notice, SIGTERM, 5 s later SIGKILL; and the sentence blames the one that failed."""
    agents.add("h1")
    source = """
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))
os.write(1, f"{os.getpid()}\\n".encode())
sys.exit(7) if rank == 1 else wait_for_signals()
"""
    launched = launch(*agents.options, "-np", "2", *program(source), environ=agents.environ)
    code, out, err = launched.finish()
    assert code == 7
    assert out.count("[0]<stdout>:asked\n") == 1
    assert re.search(ends_with(LaunchCode.RANK_FAILED, "Rank 1 on host h1 (pid ", "exit code 7;", "rank 0 "), err)
    pid = next(
        int(line.partition(":")[2]) for line in out.splitlines() if line.startswith("[0]") and "asked" not in line
    )
    assert not psutil.pid_exists(pid)


def test_a_host_that_dies_between_its_registration_and_the_start(
    agents: Agents, launch: Launch, program: Program
) -> None:
    """Its agent is stopped before the job is submitted, so nothing comes of the order to start; then it is killed."""
    agents.add("h1", 1)
    dying = agents.add("h2", 1)
    warm = launch(*agents.options, "-np", "2", "true", environ=agents.environ)
    assert warm.finish()[0] == 0  # from now on the hosts are known to reach each other
    dying.send_signal(signal.SIGSTOP)
    launched = launch(
        *agents.options,
        "-np",
        "2",
        *program("print(os.getpid(), flush=True)\nwait_for_signals()"),
        environ=agents.environ,
    )
    ranks = ranks_of(launched, 1)
    dying.kill()
    code, _, err = launched.finish()
    assert code == 255
    assert re.search(ends_with(LaunchCode.RANK_FAILED, "Rank 1 on host h2 is lost", " 2 s;", "rank 0 "), err)
    assert still_alive(ranks) == []


def test_a_host_that_dies_while_hosts_connect(agents: Agents, launch: Launch) -> None:
    """The job, of which nothing runs yet, waits for another host."""
    agents.add("h1", 1)
    dying = agents.add("h2", 1)
    dying.send_signal(signal.SIGSTOP)  # it answers no probe
    launched = launch(*agents.options, "-np", "2", "true", environ=agents.environ)
    dying.kill()
    agents.add("h3", 1)
    code, _, err = launched.finish()
    assert code == 0, err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 5 MB, the state of an agent."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_fills_up(agents: Agents, launch: Launch, program: Program, small_disk: Path) -> None:
    """20 MB of output, 4 MB of disk: the launcher that follows gets all of it, and the job ends as it should."""
    agents.add("h1", 1, "--state-dir", str(small_disk))
    source = """
for number in range(20_000):
    print(f"{number:06d}", "x" * 992)
sys.exit(3)
"""
    launched = launch(*agents.options, "-np", "1", *program(source), environ=agents.environ)
    code, out, err = launched.finish()
    assert code == 3, err
    expected = [f"[0]<stdout>:{number:06d} {'x' * 992}" for number in range(20_000)]
    assert out.splitlines() == expected
    assert shutil.disk_usage(small_disk).free < 3 << 20  # so it was full, but for the spare segment that is given back


def fill(disk: Path) -> Path:
    """Leaves so little room that no log can begin."""
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(disk).free - (1 << 20)))
    return ballast


def test_a_job_waits_for_a_disk_that_is_full(
    agents: Agents, launch: Launch, program: Program, small_disk: Path
) -> None:
    """The host is set aside, with the reason for all to see, and gets the job when there is room."""
    agents.add("h1", 1, "--state-dir", str(small_disk))
    ballast = fill(small_disk)
    launched = launch(*agents.options, "-np", "1", *program("print('ran')"), environ=agents.environ)
    assert eventually(lambda: "set aside: the disk of" in shown(launch, agents))
    ballast.unlink()
    code, out, err = launched.finish()
    assert (code, out) == (0, "[0]<stdout>:ran\n"), err


def shown(launch: Launch, agents: Agents) -> str:
    return launch("ps", *agents.options, environ=agents.environ).finish()[1]


def test_a_disk_that_is_full_does_not_eat_the_queue(agents: Agents, launch: Launch, small_disk: Path) -> None:
    """Jobs that the host was given go to another one."""
    agents.add("h1", 1, "--state-dir", str(small_disk))
    fill(small_disk)
    agents.add("h2", 1)
    jobs = [
        launch(*agents.options, "-np", "1", sys.executable, "-c", f"print({number})", environ=agents.environ)
        for number in range(3)
    ]
    for number, job in enumerate(jobs):
        code, out, err = job.finish()
        assert (code, out) == (0, f"[0]<stdout>:{number}\n"), err


def test_old_logs_make_way(agents: Agents, launch: Launch, program: Program, small_disk: Path) -> None:
    """Each job leaves 2 MB of output on a disk of 5 MB, and each needs as much to start."""
    agents.add("h1", 1, "--state-dir", str(small_disk))
    source = "for number in range(2_000):\n    print('x' * 1000)\n"
    for _ in range(4):
        code, out, err = launch(*agents.options, "-np", "1", *program(source), environ=agents.environ).finish()
        assert (code, out.count("\n")) == (0, 2_000), err


def test_a_killed_agent_of_a_launcher_leaves_no_folder(launch: Launch, program: Program, tmp_path: Path) -> None:
    finds = ["--host-discovery-script", "echo localhost:1"]
    command = program("print(os.getpid(), flush=True)\nwait_for_signals()")
    launched = launch("-np", "1", *finds, *command, environ={"TMPDIR": str(tmp_path)})
    ranks = ranks_of(launched, 1)
    children = psutil.Process(launched.process.pid).children(recursive=True)
    (agent,) = [one for one in children if "--stdin" in one.cmdline()[-1]]
    assert list(tmp_path.glob("horovod-agent-*"))
    agent.kill()
    assert launched.finish()[0] == 1
    assert still_alive(ranks) == []
    assert list(tmp_path.glob("horovod-agent-*")) == []
