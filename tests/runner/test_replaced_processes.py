"""Processes that are killed in the middle of training, and replaced, while the others run on: real processes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import psutil
from agents import Agents
from error_codes import ends_with
from event_words import REPLACED
from launching import Launched, still_alive

from horovod.base.errors import LaunchCode

Run = Callable[..., CompletedProcess[str]]
Launch = Callable[..., Launched]
Program = Callable[[str], list[str]]

# Without PyTorch, whose import takes longer than all the rest.
ELASTIC = """
from array import array
from horovod._core import OpSpec
from horovod.common import basics as hvd
from horovod.common.elastic import State, run_fn
from horovod.worker.runtime.context import current

incarnation = os.environ["HOROVOD_INCARNATION"]

def total(number):
    data = array("f", [float(number)])
    pointer = data.buffer_info()[0]
    current().engine.submit(OpSpec(0), "allreduce.total", [(pointer, pointer, 7, (1,))]).result()
    return int(data[0])

class Steps(State):
    "How many steps have been taken; a process that is new has taken none."
    def __init__(self):
        super().__init__(lambda value, root_rank=0: value, hvd.rank)
        self.steps = self.saved = 0
    def save(self):
        self.saved = self.steps
    def restore(self):
        self.steps = self.saved
    def sync(self):
        known = total(self.steps > 0)
        self.steps = total(self.steps) // max(known, 1)

def train(state):
    while state.steps < 6:
        assert total(1) == 2
        state.steps += 1
        state.save()
        print("step", state.steps, os.getpid(), flush=True)
        if state.steps == 3 and incarnation == "1":
            total(0)  # the other one has saved this step as well
            if rank == 1:
                DIES
    return state.steps

def reset():
    hvd.shutdown()
    hvd.init()

hvd.init()
print("took", run_fn(train, reset)(Steps()), flush=True)
"""
KILLED = ELASTIC.replace("DIES", "os.kill(os.getpid(), signal.SIGKILL)")


def check_steps(out: str) -> None:
    """Rank 0 was one process; another one of rank 1 began where the first had stopped."""
    steps = re.findall(r"\[(\d)\]<stdout>:step (\d) (\d+)", out)
    assert [int(step) for rank, step, _ in steps if rank == "0"] == [1, 2, 3, 4, 5, 6]
    assert len({pid for rank, _, pid in steps if rank == "0"}) == 1
    first, *_, last = [pid for rank, _, pid in steps if rank == "1"]
    assert [int(step) for rank, step, pid in steps if rank == "1" and pid == first] == [1, 2, 3]
    assert [int(step) for rank, step, pid in steps if rank == "1" and pid == last] == [4, 5, 6]
    assert out.count("took 6") == 2


def test_a_killed_process_is_replaced_on_this_machine(horovodrun: Run, program: Program) -> None:
    done = horovodrun("-np", "2", "--min-np", "2", *program(KILLED))
    assert done.returncode == 0, done.stderr
    check_steps(done.stdout)
    assert re.search(rf"horovodrun: Slot 1 on host .*SIGKILL.*{REPLACED}", done.stderr)


def test_a_survivor_is_rank_0_after_rank_0_was_killed(horovodrun: Run, program: Program) -> None:
    """So a state that sends what rank 0 has, as states of scripts' own do, goes on from the survivor's steps."""
    from_rank_0 = "self.steps = total(0 if hvd.rank() else self.steps)"
    source = KILLED.replace("known = total(self.steps > 0)", from_rank_0).replace("if rank == 1:", "if rank == 0:")
    source = source.replace(
        "self.steps = total(self.steps) // max(known, 1)", "print('begins', hvd.rank(), self.steps)"
    )
    done = horovodrun("-np", "2", "--min-np", "2", *program(source))
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"\[(\d)\]<stdout>:begins (\d) (\d)", done.stdout)) == [
        ("0", "0", "0"),
        ("0", "1", "3"),  # the replacement
        ("1", "0", "3"),  # the survivor
        ("1", "1", "0"),
    ]
    assert done.stdout.count("took 6") == 2


def test_a_killed_process_is_replaced_by_its_agent(tmp_path: Path, launch: Launch, program: Program) -> None:
    with Agents(tmp_path) as agents:
        agents.add("h1", slots=1)
        agents.add("h2", slots=1)
        options = [*agents.options, "-np", "2", "--min-np", "2"]
        code, out, err = launch(*options, *program(KILLED), environ=agents.environ).finish()
    assert code == 0, err
    check_steps(out)
    assert re.search(rf"Slot 1 on host h2 .*SIGKILL.*{REPLACED}", err)


def test_the_next_agent_replaces_what_has_failed_without_one(tmp_path: Path, launch: Launch, program: Program) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    source = ELASTIC.replace("DIES", f"open({str(go)!r}).read(); os.kill(os.getpid(), signal.SIGKILL)")
    with Agents(tmp_path) as agents:
        agents.add("h1")
        options = [*agents.options, "-np", "2", "--min-np", "2"]
        launched = launch(*options, *program(source), environ=agents.environ)
        steps = launched.lines(6)
        dying = psutil.Process(int(next(line for line in steps if line.startswith("[1]")).rpartition(" ")[2]))
        agents.processes["h1"].kill()
        agents.processes["h1"].communicate()
        with go.open("w"):
            pass
        assert still_alive([dying]) == []
        agents.add("h1")
        code, out, err = launched.finish()
    assert code == 0, err
    check_steps("\n".join([*steps, out]))


def test_a_process_that_is_replaced_leaves_nothing_behind(horovodrun: Run, program: Program, tmp_path: Path) -> None:
    """What it has started ends before the next one starts."""
    note = tmp_path / "child"
    starts = f"import subprocess; open({str(note)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))"
    source = ELASTIC.replace("DIES", f"{starts}; os.kill(os.getpid(), signal.SIGKILL)")
    checks = f"""
import psutil
try:
    left = psutil.Process(int(open({str(note)!r}).read())).status() if os.environ["HOROVOD_INCARNATION"] == "2" else ""
except psutil.NoSuchProcess:
    left = ""
assert left in ("", psutil.STATUS_ZOMBIE), left
"""
    done = horovodrun("-np", "2", "--min-np", "2", *program(checks + source))
    assert done.returncode == 0, done.stderr


def test_a_program_that_fails_before_init_is_not_tried_again(horovodrun: Run) -> None:
    done = horovodrun("-np", "2", "--min-np", "1", "sh", "-c", "echo up; echo broken >&2; exit 3")
    assert done.returncode == 3
    assert done.stdout.count("up") in (2, 3)  # a third time, if the other one has needed a second longer
    last = done.stderr.splitlines()[-1]
    assert re.search(ends_with(LaunchCode.FAILED_AT_START, "exit code 3", "broken"), last)


def test_a_program_that_fails_in_each_world_is_started_so_often_only(horovodrun: Run, program: Program) -> None:
    fails = "from horovod.common import basics as hvd; hvd.init(); print('up', flush=True); raise OSError('broken')"
    done = horovodrun("-np", "2", "--min-np", "2", "--reset-limit", "1", *program(fails))
    assert done.returncode == 1
    assert done.stdout.count("up") in (2, 3)
    assert re.search(ends_with(LaunchCode.RESET_LIMIT, "limit: 1", "--reset-limit", "OSError: broken"), done.stderr)


def test_survivors_go_on_while_what_is_started_in_place_of_one_fails(
    horovodrun: Run, program: Program, tmp_path: Path
) -> None:
    third = tmp_path / "third"
    os.mkfifo(third)
    fails = f"""
attempts = {str(tmp_path / "attempts")!r}
if os.environ["HOROVOD_INCARNATION"] != "1":
    with open(attempts, "a") as file:
        file.write("x")
    if os.path.getsize(attempts) == 3:
        open({str(third)!r}, "w").close()
    raise ImportError("broken")
"""
    source = KILLED.replace("from array", f"{fails}from array", 1).replace("if rank == 1:", "if rank == 2:")
    waits = f"if state.steps == 4 and rank == 0: open({str(third)!r}).read()"
    source = source.replace("assert total(1) == 2", f"{waits}\n        total(1)")
    done = horovodrun("-np", "3", "--min-np", "2", *program(source))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("took") == 2
    delays = re.findall(rf"{REPLACED}( in \d+ s)?\.", done.stderr)
    assert delays[:3] == ["", " in 1 s", " in 2 s"]


def test_a_job_whose_processes_are_replaced_can_be_stopped(launch: Launch, program: Program) -> None:
    launched = launch("-np", "2", "--min-np", "2", *program("print(os.getpid(), flush=True)\nwait_for_signals()"))
    ranks = [psutil.Process(int(line.partition(":")[2])) for line in launched.lines(2)]
    launched.signal(signal.SIGINT)
    code, _, err = launched.finish()
    assert code == 128 + signal.SIGINT, err
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in ranks)
