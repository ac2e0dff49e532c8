"""Jobs whose size changes, with real processes: they go on without what is killed, and take in what comes."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest
from agents import AGENT, Agents
from event_words import AGENT_SERVES, EPOCH_BEGAN, SLOTS_COME_BACK
from launching import Launched
from test_replaced_processes import ELASTIC

Run = Callable[..., CompletedProcess[str]]
Launch = Callable[..., Launched]
Program = Callable[[str], list[str]]

# Steps until one is taken in a world of two members again, with a commit after each. It says only when the size has
# changed: without that it would say thousands of lines while it is alone, which all have to pass on.
CHANGES = {
    "class Steps": "FIRST_SAYS\nSAYS_SIZES\nclass Steps",
    "lambda value, root_rank=0: value": "first_says",
    "self.steps = self.saved = 0": "self.steps = self.saved = self.last_size = 0",
    "while state.steps < 6:": "while state.steps < 6 or state.last_size < 2:",
    "        state.steps += 1\n": "        state.steps += 1\n        state.last_size = hvd.size()\n",
    "assert total(1) == 2": "assert total(1) == hvd.size()",
    "        state.save()\n": "        state.commit()\n",
    'print("step", state.steps, os.getpid(), flush=True)': "say(state.steps)",
    "    hvd.shutdown()\n    hvd.init()\n": "    hvd.join_again()\n",
}
FIRST_SAYS = """
from horovod.common.elastic import HostUpdateResult

def first_says(news, root_rank=0):
    "What rank 0 has heard of hosts that came."
    return bool(total(int(news[0] and hvd.rank() == 0))), HostUpdateResult.added
"""
SAYS_SIZES = """
import time
said = []
def say(steps):
    if said[-1:] != [hvd.size()]:
        said.append(hvd.size())
        print("step", steps, hvd.size(), flush=True)
    time.sleep(0.01)  # a step takes a while, so that who is alone leaves the processor to those who come
"""


def source(dies: str) -> str:
    text = ELASTIC
    for old, new in CHANGES.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text.replace("FIRST_SAYS", FIRST_SAYS).replace("SAYS_SIZES", SAYS_SIZES).replace("DIES", dies)


def sizes(out: str, rank: int) -> list[int]:
    """Those of the worlds in which this rank has taken steps, each once for worlds that follow each other."""
    found = [int(size) for size in re.findall(rf"\[{rank}\]<stdout>:step \d+ (\d)", out)]
    return [size for place, size in enumerate(found) if place == 0 or found[place - 1] != size]


def test_a_job_goes_on_alone_and_takes_in_who_replaces_the_killed_one(horovodrun: Run, program: Program) -> None:
    done = horovodrun("-np", "2", "--min-np", "1", *program(source("os.kill(os.getpid(), signal.SIGKILL)")))
    assert done.returncode == 0, done.stderr
    assert sizes(done.stdout, rank=0) == [2, 1, 2]
    assert done.stdout.count("took") == 2
    assert EPOCH_BEGAN not in done.stderr, "the story is for --verbose"


@pytest.mark.parametrize("cooldown", [[], ["--blacklist-cooldown-range", "1", "1"]])
def test_a_job_goes_on_without_a_lost_host_and_grows_on_another_or_on_it(
    tmp_path: Path, launch: Launch, program: Program, cooldown: list[str]
) -> None:
    with Agents(tmp_path) as agents:
        agents.add("h1", slots=1)
        agents.add("h2", slots=1)
        options = [*agents.options, "-np", "2", "--min-np", "1", "--max-np", "2", *cooldown]
        waits = "print('pid', os.getpid(), flush=True); __import__('time').sleep(600)"
        launched = launch(*options, *program(source(waits)), environ=agents.environ)
        said: list[str] = []
        while not any("[1]<stdout>:pid" in line for line in said):
            said += launched.lines(1)
        trains = psutil.Process(int(next(line for line in said if "[1]<stdout>:pid" in line).rpartition(" ")[2]))
        # All that ran on the host is gone at once: its agent, what keeps the job there, and the process that it trains.
        above = [one for one in trains.parents() if "horovod.worker" in " ".join(one.cmdline())]
        for process in [psutil.Process(agents.processes["h2"].pid), *above, trains]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        agents.processes["h2"].communicate()
        agents.add("h2", slots=1)  # the host was started again: what ran there is known to be lost
        while not any(line.endswith(" 1") for line in said if "[0]<stdout>:step" in line):
            said += launched.lines(1)
        if not cooldown:
            agents.add("h3", slots=1)
        code, out, err = launched.finish()
    assert code == 0, err
    assert sizes("\n".join([*said, out]), rank=0) == [2, 1, 2]
    assert "[1]<stdout>:took" in out  # the output of the second process, though a first one of that rank had a log
    assert "Host h2 gets no" in err
    assert ("Host h2 is used again." in err) == bool(cooldown)
    assert "There is room for 1 further process." in err


def test_a_job_file_grows_from_its_fewest_workers_to_its_most(tmp_path: Path, launch: Launch, program: Program) -> None:
    """Each worker has the code, and runs the lines before the one that trains, whenever it comes."""
    python, path = program("import prepared\n" + source("pass"))
    file = tmp_path / "job.yaml"
    (tmp_path / ".horovodignore").write_text("*\n!program.py\n")
    lines = f"  - touch prepared.py\n  - distributed: {python} {Path(path).name}\n"
    file.write_text(f"workers: {{min: 1, max: 2}}\ncode: .\nrun:\n{lines}")
    with Agents(tmp_path) as agents:
        agents.add("h1", slots=1)
        launched = launch("submit", *agents.options, str(file), environ=agents.environ)
        said: list[str] = []
        while not any(line.endswith(" 1") for line in said if "[0]<stdout>:step" in line):
            said += launched.lines(1)
        agents.add("h2", slots=1)
        code, out, err = launched.finish()
    assert code == 0, err
    assert sizes("\n".join([*said, out]), rank=0) == [1, 2]


# Says by which way this member speaks to the coordinator, when that has changed.
SAYS_WAY = """
import psutil
ways = []
def say_way():
    port = int(os.environ["HOROVOD_COORDINATOR"].rpartition(":")[2])
    connections = psutil.Process().net_connections("tcp")
    own = any(one.raddr and one.raddr.port == port for one in connections)
    way = hvd.size(), "direct" if own else "relayed"
    if ways[-1:] != [way]:
        ways.append(way)
        print("way", *way, flush=True)
"""


def test_slots_go_to_a_job_that_waits_and_come_back(tmp_path: Path, launch: Launch, program: Program) -> None:
    done = tmp_path / "done"
    has_run = f"hvd.size() * (total(os.path.exists({str(done)!r})) > 0)"
    text = source("pass").replace("state.last_size = hvd.size()", f"state.last_size = {has_run}")
    with Agents(tmp_path) as agents:
        agents.add("h1", slots=2)
        options = [*agents.options, "-np", "1"]
        launched = launch(*options, "--min-np", "1", "--max-np", "2", *program(text), environ=agents.environ)
        said: list[str] = []
        while not any(line.endswith(" 2") for line in said if "[0]<stdout>:step" in line):
            said += launched.lines(1)
        other = launch(*options, sys.executable, "-c", f"open({str(done)!r}, 'w')", environ=agents.environ)
        other_code, _, other_err = other.finish()
        code, out, err = launched.finish()
    assert other_code == 0, other_err
    assert SLOTS_COME_BACK in other_err
    assert code == 0, err
    assert sizes("\n".join([*said, out]), rank=0) == [2, 1, 2]
    assert "given back" in err
    assert out.count("took") == 2


def test_a_job_follows_the_slots_of_its_host(tmp_path: Path, launch: Launch, program: Program) -> None:
    """The agent is started again: first with fewer slots, and then with as many as before.

    Members speak over its relay, which ends with it, and over that of the next agent in worlds that form later.
    """
    again = tmp_path / "again"
    was_smaller = f"hvd.size() * (total(os.path.exists({str(again)!r})) > 0)"
    text = SAYS_WAY + source("pass").replace("state.last_size = hvd.size()", f"state.last_size = {was_smaller}")
    text = text.replace("    say(state.steps)", "    say_way()\n        say(state.steps)")
    with Agents(tmp_path) as agents:
        agents.add("h1", slots=2)
        options = [*agents.options, "-np", "2", "--min-np", "1", "--max-np", "2"]
        launched = launch(*options, *program(text), environ=agents.environ)
        said: list[str] = []
        for size, slots in ((2, 1), (1, 2)):
            while not any(line.endswith(f" {size}") for line in said if "[0]<stdout>:step" in line):
                said += launched.lines(1)
            agents.processes["h1"].kill()
            agents.processes["h1"].communicate()
            agents.add("h1", slots=slots)
        again.touch()
        code, out, err = launched.finish()
    assert code == 0, err
    assert sizes("\n".join([*said, out]), rank=0) == [2, 1, 2]
    ways = "\n".join([*said, out])
    assert ways.count("[0]<stdout>:way 2 relayed") == 2, ways  # the first world, and the last one
    assert "[0]<stdout>:way 1 relayed" in ways
    assert "since host h1 has 1 slot now" in err
    assert "replaced" not in err


def test_an_agent_that_belongs_to_a_launcher_is_told_of_its_slots(tmp_path: Path, launch: Launch) -> None:
    with Agents(tmp_path) as agents:
        order = {"name": "h1", "slots": 1, "coordinators": [agents.coordinator.address]}
        order |= {"token": agents.coordinator.token, "keepalive_timeout_s": 20, "alone_s": 60}
        command = [*AGENT, "--stdin"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
            assert agent.stdin is not None
            assert agent.stdout is not None
            agent.stdin.write(json.dumps(order) + "\n" + '{"slots": 3}\n{"slo')
            agent.stdin.flush()
            assert agent.stdout.readline() == f"{AGENT_SERVES} 3 slots as h1\n"
            options = [*agents.options, "--verbose", sys.executable, "-c", "pass"]
            code, _, err = launch("-np", "3", *options, environ=agents.environ).finish()
            assert code == 0, err
            waits = launch("-np", "4", *options, environ=agents.environ)
            agent.stdin.write('ts": 4}\n')
            agent.stdin.flush()
            code, _, err = waits.finish()
            assert code == 0, err
            agent.stdin.close()
            assert agent.wait(60) == 0


def test_who_comes_when_the_work_is_done_does_not_do_it_again(
    horovodrun: Run, program: Program, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    waits = f"""
import psutil
if rank == 0:
    open({str(first)!r}, "w").write(str(os.getpid()))
elif os.environ["HOROVOD_INCARNATION"] == "2":
    print("another", flush=True)
    try:
        rank_0 = psutil.Process(int(open({str(first)!r}).read()))
        while rank_0.status() != psutil.STATUS_ZOMBIE:
            os.sched_yield()
    except psutil.NoSuchProcess:
        pass
"""
    text = source("os.kill(os.getpid(), signal.SIGKILL)").replace(" or state.last_size < 2", "")
    done = horovodrun("-np", "2", "--min-np", "1", *program(waits + text))
    assert done.returncode == 0, done.stderr
    assert sizes(done.stdout, rank=0) == [2, 1]
    assert "[1]<stdout>:another" in done.stdout
    assert done.stdout.count("took") == 1


def test_a_program_that_always_fails_in_order_fails_the_job(horovodrun: Run, program: Program) -> None:
    """With sys.exit it leaves its world as one does that has done its work."""
    text = source("pass").replace(" or state.last_size < 2", "") + "\nsys.exit(3)\n"
    done = horovodrun("-np", "2", "--min-np", "1", "--reset-limit", "2", *program("import sys\n" + text))
    assert done.returncode == 3, done.stdout + done.stderr
