"""Jobs on two agents of this host: placed, followed, ended; and an agent that is killed while its ranks run."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from agents import Agents, CoordinatorProcess
from certificates import Authority
from error_codes import ends_with
from event_words import NO_RANK_IS_LEFT, STOPPED_BY_LAUNCHER, tells
from launching import Launched, still_alive
from resources import eventually

from horovod.base.errors import ClusterCode, OperationCode
from horovod.coordinator.server import EmbeddedCoordinator

Launch = Callable[..., Launched]
Program = Callable[[str], list[str]]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with Agents(tmp_path) as agents:
        agents.add("h1")
        agents.add("h2")
        yield agents


def test_output_and_exit_code_come_back(agents: Agents, launch: Launch, program: Program) -> None:
    source = """
print(os.environ["HOROVOD_HOSTNAME"], os.environ["HOROVOD_LOCAL_RANK"], os.environ["HOROVOD_CROSS_RANK"])
print("an error", file=sys.stderr)
os.write(1, bytes(range(1, 10)) + b"\\n" if rank == 2 else b"")
"""
    launched = launch(*agents.options, "-np", "4", *program(source), environ=agents.environ)
    code, out, err = launched.finish()
    assert code == 0, err
    assert sorted(line for line in out.splitlines() if " " in line) == [
        "[0]<stdout>:h1 0 0",
        "[1]<stdout>:h1 1 0",
        "[2]<stdout>:h2 0 1",
        "[3]<stdout>:h2 1 1",
    ]
    assert sorted(err.splitlines()) == [f"[{rank}]<stderr>:an error" for rank in range(4)]


def test_a_rank_that_fails_ends_those_on_other_hosts(agents: Agents, launch: Launch, program: Program) -> None:
    source = "print('up')\nsys.exit(7) if rank == 1 else wait_for_signals()"
    code, _, err = launch(*agents.options, "-np", "4", *program(source), environ=agents.environ).finish()
    assert code == 7
    assert "Rank 1 on host h1 (pid " in err
    assert tells(err, "exit code 7", f"ranks 0, 2 and 3 were {STOPPED_BY_LAUNCHER}")


def test_a_job_whose_environment_is_too_long_is_refused_and_others_run(agents: Agents, launch: Launch) -> None:
    large = {f"LARGE_{number}": "x" * 125_000 for number in range(14)}
    code, _, err = launch(*agents.options, "-np", "1", "true", environ={**agents.environ, **large}, child=True).finish()
    assert code == 1
    assert tells(err, f"[{ClusterCode.JOB_TOO_LARGE}]", "env -u LARGE_")
    assert launch(*agents.options, "-np", "1", "true", environ=agents.environ).finish()[0] == 0


def test_ctrl_c_ends_the_job(agents: Agents, launch: Launch, program: Program) -> None:
    launched = launch(*agents.options, "-np", "2", *program("print(os.getpid())\nwait_for_signals()"),
                      environ=agents.environ)  # fmt: skip
    ranks = [psutil.Process(int(line.partition(":")[2])) for line in launched.lines(2)]
    launched.signal(signal.SIGINT)
    code, _, err = launched.finish()
    assert code == 128 + signal.SIGINT
    assert tells(err, "SIGINT", NO_RANK_IS_LEFT)
    assert still_alive(ranks) == []


def test_ctrl_z_reaches_the_ranks_before_the_launcher_stops(agents: Agents, launch: Launch, program: Program) -> None:
    launched = launch(*agents.options, "-np", "2", *program("print(os.getpid())\nwait_for_signals()"),
                      environ=agents.environ, child=True)  # fmt: skip
    ranks = [psutil.Process(int(line.partition(":")[2])) for line in launched.lines(2)]
    launched.signal(signal.SIGTSTP)
    _, status = os.waitpid(launched.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    # The coordinator has taken the signal; agent and shim carry it on.
    assert eventually(lambda: all(rank.status() == psutil.STATUS_STOPPED for rank in ranks))
    launched.signal(signal.SIGCONT)
    assert eventually(lambda: all(rank.status() != psutil.STATUS_STOPPED for rank in ranks))
    launched.signal(signal.SIGTERM)
    assert launched.finish()[0] == 128 + signal.SIGTERM
    assert still_alive(ranks) == []


def test_a_job_ends_whose_launcher_is_killed_after_ctrl_z(agents: Agents, launch: Launch, program: Program) -> None:
    """Nobody else would continue its ranks, and they would hold their slots for ever."""
    launched = launch(*agents.options, "-np", "2", *program("print(os.getpid())\nwait_for_signals()"),
                      environ=agents.environ, child=True)  # fmt: skip
    ranks = [psutil.Process(int(line.partition(":")[2])) for line in launched.lines(2)]
    launched.signal(signal.SIGTSTP)
    os.waitpid(launched.process.pid, os.WUNTRACED)
    assert eventually(lambda: all(rank.status() == psutil.STATUS_STOPPED for rank in ranks))
    launched.signal(signal.SIGKILL)
    assert still_alive(ranks) == []


def test_ctrl_z_stops_the_launcher_of_a_coordinator_that_is_silent(
    tmp_path: Path, launch: Launch, program: Program
) -> None:
    """What follows Ctrl-Z does not overtake it: the ranks are stopped, go on, and get SIGUSR1."""
    coordinator = CoordinatorProcess(tmp_path)
    with Agents(tmp_path, coordinator=coordinator) as agents:
        assert coordinator.process is not None
        agents.add("h1")
        source = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\nprint('ready')\nwait_for_signals()"
        launched = launch(*agents.options, "-np", "2", *program(source), environ=agents.environ, child=True)
        launched.lines(2)
        coordinator.process.send_signal(signal.SIGSTOP)
        launched.signal(signal.SIGTSTP)
        launched.signal(signal.SIGTSTP)
        _, status = os.waitpid(launched.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        coordinator.process.send_signal(signal.SIGCONT)
        launched.signal(signal.SIGCONT)
        launched.signal(signal.SIGUSR1)
        assert launched.finish() == (0, "", "")


def test_the_others_hear_by_which_signal_a_rank_ended(agents: Agents, launch: Launch, program: Program) -> None:
    source = """
from horovod.worker.runtime import context
from horovod.worker.runtime.errors import MemberLostError
member = context.init()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    member.session.member.check(60)
except MemberLostError as error:
    print(error)
"""
    code, out, err = launch(*agents.options, "-np", "3", *program(source), environ=agents.environ).finish()
    assert code == 128 + signal.SIGKILL, err
    heard = sorted(out.splitlines())
    assert [line.partition(":")[0] for line in heard] == ["[0]<stdout>", "[2]<stdout>"]
    for line in heard:
        assert re.search(ends_with(OperationCode.PEER_LOST, "Rank 1 (pid ", "on host h1 ", "signal 9 (SIGKILL)"), line)


def test_a_job_survives_the_kill_of_its_agent(agents: Agents, launch: Launch, program: Program, tmp_path: Path) -> None:
    """Its ranks run on under their shim, and the next agent finds them."""
    go = tmp_path / "go"
    os.mkfifo(go)
    source = f"print(os.getpid())\nopen({str(go)!r}).read()\nprint('done')"
    launched = launch(*agents.options, "-np", "1", *program(source), environ=agents.environ)
    (line,) = launched.lines(1)
    agents.processes["h1"].kill()
    agents.processes["h1"].communicate()
    assert psutil.pid_exists(int(line.partition(":")[2]))
    agents.add("h1")
    with go.open("w"):
        pass
    code, out, err = launched.finish()
    assert (code, out) == (0, "[0]<stdout>:done\n"), err


def connections_to(address: str, pid: int) -> list[object]:
    port = int(address.rpartition(":")[2])
    return [one for one in psutil.Process(pid).net_connections("tcp") if one.raddr and one.raddr.port == port]


RELAYED = f"""
sys.path.insert(0, {str(Path(__file__).parents[1] / "runtime")!r})
import numpy as np
import psutil
from numpy_framework import OPS, global_process_set, hvd
from horovod.worker.runtime import context
member = context.init()
port = int(os.environ["HOROVOD_COORDINATOR"].rpartition(":")[2])
def tell(name):
    total = OPS.allreduce(np.ones(1), hvd.Sum, name, 1.0, 1.0, global_process_set)
    connections = psutil.Process().net_connections("tcp")
    own = sum(bool(one.raddr) and one.raddr.port == port for one in connections)
    print(name, int(total[0]), "direct" if own else "relayed")
tell("before")
"""


def test_ranks_speak_over_their_agent_and_by_themselves_once_it_is_killed(
    agents: Agents, launch: Launch, program: Program, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    source = f"{RELAYED}\nif rank < 2:\n    open({str(go)!r}).read()\ntell('after')"
    launched = launch(*agents.options, "-np", "3", *program(source), environ=agents.environ)
    assert sorted(launched.lines(3)) == [f"[{rank}]<stdout>:before 3 relayed" for rank in range(3)]
    for agent in agents.processes.values():  # that of the agent itself is that of its ranks
        assert len(connections_to(agents.coordinator.address, agent.pid)) == 1
    agents.processes["h1"].kill()
    agents.processes["h1"].communicate()
    with go.open("w"):
        pass
    # Its output is told by the next agent of the host; that of rank 2 by an agent that was there all the time.
    assert launched.lines(1) == ["[2]<stdout>:after 3 relayed"]
    agents.add("h1")
    code, out, err = launched.finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:after 3 direct" for rank in range(2)]


def test_certificates_are_shown_and_asked_for_over_the_relay_too(
    tmp_path: Path, launch: Launch, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent shows its own; its ranks find theirs in the environment, which it knows to be the same."""
    authority = Authority(tmp_path / "tls")
    client = authority.client(cert=True)
    assert client.cert
    assert client.key
    for name, value in (("CA", client.ca), ("CERT", client.cert), ("KEY", client.key)):
        monkeypatch.setenv(f"HOROVOD_TLS_{name}", value)
    coordinator = EmbeddedCoordinator(token="of-this-test", tls=authority.server(mutual=True))
    with Agents(tmp_path, coordinator=coordinator) as agents:
        agents.add("h1")
        launched = launch(*agents.options, "-np", "2", *program(RELAYED), environ=agents.environ)
        code, out, err = launched.finish()
        assert code == 0, err
        assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:before 2 relayed" for rank in range(2)]
        assert len(connections_to(coordinator.address, agents.processes["h1"].pid)) == 1


def test_a_job_may_do_without_the_relay(agents: Agents, launch: Launch, program: Program) -> None:
    environ = {**agents.environ, "HOROVOD_RELAY": "0"}
    code, out, err = launch(*agents.options, "-np", "1", *program(RELAYED), environ=environ).finish()
    assert (code, out) == (0, "[0]<stdout>:before 1 direct\n"), err


def test_ranks_without_an_agent_are_ended(tmp_path: Path, launch: Launch, program: Program) -> None:
    with Agents(tmp_path) as agents:
        agents.add("h1", 2, "--orphan-grace-seconds", "0.2")
        launched = launch(*agents.options, "-np", "2", *program("print(os.getpid())\nwait_for_signals()"),
                          environ=agents.environ)  # fmt: skip
        ranks = [psutil.Process(int(line.partition(":")[2])) for line in launched.lines(2)]
        agents.processes["h1"].kill()
        agents.processes["h1"].communicate()
        assert still_alive(ranks) == []
        agents.add("h1")  # tells what it finds
        code, _, err = launched.finish()
        assert code == 128 + signal.SIGTERM
        assert "ended by signal 15" in err or STOPPED_BY_LAUNCHER in err


def test_an_agent_that_drains_leaves_when_its_job_has_ended(
    agents: Agents, launch: Launch, program: Program, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    source = f"print('up')\nopen({str(go)!r}).read()"
    launched = launch(*agents.options, "-np", "1", *program(source), environ=agents.environ)
    launched.lines(1)
    agents.processes["h1"].terminate()
    assert "Draining" in agents.processes["h1"].stderr.readline()  # type: ignore[union-attr]
    with go.open("w"):
        pass
    assert launched.finish()[0] == 0
    assert agents.processes["h1"].wait(60) == 0
