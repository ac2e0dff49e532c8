"""A coordinator that keeps its state in a file, killed and started again while jobs run: none of them ends."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from agents import DEADLINE_S, Agents, CoordinatorProcess
from launching import STEPS, Launched

from horovod.coordinator.store.records import SUBMITTED

Launch = Callable[..., Launched]
Program = Callable[[str], list[str]]

# Two starts on a busy machine take longer than ranks usually wait with an agreement for a coordinator, and than a
# coordinator waits for members that it has found in its store.
PATIENCE_S = "300"


@pytest.fixture
def coordinator(tmp_path: Path) -> CoordinatorProcess:
    return CoordinatorProcess(tmp_path, "--store", f"sqlite:{tmp_path}/store", "--reattach-grace-seconds", PATIENCE_S)


def test_a_job_goes_on_through_a_kill_of_its_coordinator(
    tmp_path: Path, launch: Launch, program: Program, coordinator: CoordinatorProcess
) -> None:
    """Ranks, agent and launcher come back to the next one, which finds job, world and output where they were."""
    go = tmp_path / "go"
    os.mkfifo(go)
    with Agents(tmp_path, coordinator=coordinator) as agents:
        agents.add("h1")
        source = f"{STEPS}\nif rank == 0:\n    open({str(go)!r}).read()\nstep('after a new agreement')\nstep('before')"
        patient = {**agents.environ, "HOROVOD_REATTACH_GRACE_SECONDS": PATIENCE_S}
        launched = launch(*agents.options, "-np", "2", *program(source), environ=patient)
        assert sorted(launched.lines(2)) == [f"[{rank}]<stdout>:before 3" for rank in range(2)]
        for _ in range(2):
            coordinator.kill()
            coordinator.start()
        with go.open("w"):
            pass
        code, out, err = launched.finish()
        assert code == 0, err
        told = [f"[{rank}]<stdout>:{name} 3" for rank in range(2) for name in ("after a new agreement", "before")]
        assert sorted(out.splitlines()) == sorted(told), err
        # A job of the next coordinator is another one, and the first is remembered.
        assert launch(*agents.options, "-np", "1", *program("print('next')"), environ=agents.environ).finish()[0] == 0
    assert SUBMITTED.encode() in (tmp_path / "store").read_bytes()


@pytest.mark.parametrize("code", [0, 3])
def test_a_launcher_ends_with_the_status_of_a_job_that_ended_without_a_coordinator(
    tmp_path: Path, launch: Launch, program: Program, coordinator: CoordinatorProcess, code: int
) -> None:
    """The agent keeps how its ranks have ended, and what they have printed, until the next coordinator asks."""
    go = tmp_path / "go"
    os.mkfifo(go)
    with Agents(tmp_path, coordinator=coordinator) as agents:
        agents.add("h1")
        ends = f"sys.exit({code} if rank == 1 else 0)"
        source = f"{STEPS}\nif rank == 0:\n    open({str(go)!r}).read()\nstep('before')\nprint(os.getpid())\n{ends}"
        launched = launch(*agents.options, "-np", "2", *program(source), environ=agents.environ)
        assert sorted(launched.lines(2)) == [f"[{rank}]<stdout>:before 3" for rank in range(2)]
        processes = psutil.Process(agents.processes["h1"].pid).children(recursive=True)
        ranks = [one for one in processes if one.cmdline()[-1].endswith("program.py")]
        coordinator.kill()
        with go.open("w"):
            pass
        assert len(psutil.wait_procs(ranks, timeout=DEADLINE_S)[0]) == 2
        coordinator.start()
        found, out, err = launched.finish()
        assert found == code, err
        assert len(re.findall("before 3", out)) == 2, out
