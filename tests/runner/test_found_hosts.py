"""Elastic jobs on hosts that a program finds: they come, go, fail and come back, with real agents and processes.

`localhost`, `127.0.0.1` and the like are hosts of their own, which need no ssh.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from error_codes import ends_with
from event_words import tells
from launching import Launched, still_alive

from horovod.base.errors import ClusterCode, LaunchCode

Run = Callable[..., CompletedProcess[str]]
Launch = Callable[..., Launched]
Program = Callable[[str], list[str]]

A, B = "localhost", "127.0.0.1"

# Trains until it was in a world of each of SIZES, in this order; when it is, rank 0 does what stands for the next size.
# Without PyTorch, whose import takes longer than all the rest.
FOLLOWS = """
from array import array
from pathlib import Path
from horovod._core import OpSpec
from horovod.common import basics as hvd
from horovod.common.elastic import HostUpdateResult, State, run_fn
from horovod.worker.runtime.context import current

first = (rank, os.environ["HOROVOD_HOSTNAME"], os.environ["HOROVOD_SIZE"])
hosts = Path(HOSTS)

def find(text):
    new = hosts.with_suffix(".new")
    new.write_text(text.replace(" ", "\\n"))
    new.rename(hosts)

def total(number):
    data = array("f", [float(number)])
    pointer = data.buffer_info()[0]
    current().engine.submit(OpSpec(0), "allreduce.total", [(pointer, pointer, 7, (1,))]).result()
    return int(data[0])

def first_says(news, root_rank=0):
    return bool(total(int(news[0] and hvd.rank() == 0))), HostUpdateResult.added

class Phases(State):
    def __init__(self):
        super().__init__(first_says, hvd.rank)
        self.phase = self.saved = self.steps = 0
    def save(self):
        self.saved = self.phase
    def restore(self):
        self.phase = self.saved
    def sync(self):
        known = total(self.steps > 0)
        self.phase = total(self.phase if self.steps else 0) // max(known, 1)
        self.save()

def train(state):
    print("enters", *first, hvd.rank(), hvd.size(), flush=True)
    while True:
        total(1)
        state.steps += 1
        if hvd.size() == SIZES[state.phase]:
            state.phase += 1
            if state.phase == len(SIZES):
                return state.phase
            state.commit()
            exec(NEXT[state.phase - 1])
        else:
            state.commit()
            time.sleep(0.02)

hvd.init()
phases = run_fn(train, hvd.join_again)(Phases())
result = (hvd.rank(), hvd.size(), *first)
print("took", phases, *result, flush=True)
hvd.shutdown()
"""


@pytest.fixture
def finds(tmp_path: Path) -> Callable[..., list[str]]:
    """finds("a:2", "b:2") are the options for a program that finds these hosts at first."""

    def options(*hosts: str) -> list[str]:
        (tmp_path / "hosts").write_text("\n".join(hosts))
        return ["--host-discovery-script", f"cat {tmp_path / 'hosts'}"]

    return options


@pytest.fixture
def follows(tmp_path: Path, program: Program) -> Callable[..., list[str]]:
    """The command of a program that wants these sizes. then: what rank 0 does after each but the last. first: what each
    process does before all else.
    """

    def command(sizes: Sequence[int], then: Sequence[str], rest: str = "", first: str = "") -> list[str]:
        values = {"SIZES": list(sizes), "NEXT": list(then), "HOSTS": str(tmp_path / "hosts")}
        return program(first + "".join(f"{name} = {value!r}\n" for name, value in values.items()) + FOLLOWS + rest)

    return command


def took(out: str) -> list[str]:
    """What those say that have done the work: rank and size of their last world, and with what they were started."""
    return sorted(re.findall(r"<stdout>:took \d (.*)", out))


@pytest.mark.parametrize("looks", [False, True])
def test_a_host_is_announced_before_its_process_is_there(
    horovodrun: Run, finds: Callable[..., list[str]], follows: Callable[..., list[str]], tmp_path: Path, looks: bool
) -> None:
    """Rank 0 hears of it while the process stands before its imports. Its commits go on, but for the one after a look:
    a script that asks `_host_messages.empty()` expects this one to take the host in.
    """
    os.mkfifo(tmp_path / "go")
    first = f"""
if os.environ["HOROVOD_HOSTNAME"] == {B!r}:
    open({str(tmp_path / "go")!r}).read()
"""
    announced = "not state._host_messages.empty()" if looks else "state._host_messages.qsize()"
    commits = "" if looks else "for _ in range(3): state.commit()"
    then = f"""
find("{A}:1 {B}:1")
while not {announced}:
    time.sleep(0.01)
{commits}
print("heard", flush=True)
open({str(tmp_path / "go")!r}, "w").close()
if {looks}:
    state.commit()
    raise SystemExit("this commit should have waited for the process")
"""
    options = ["-np", "1", "--min-np", "1", "--max-np", "2", *finds(f"{A}:1")]
    done = horovodrun(*options, *follows([1, 2], [then], first=first))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("heard") == 1
    assert [line.rsplit(" ", 2)[1:] for line in done.stdout.splitlines() if ":enters" in line].count(["0", "1"]) == 1
    assert len(took(done.stdout)) == 2


def test_hosts_come_and_go(horovodrun: Run, finds: Callable[..., list[str]], follows: Callable[..., list[str]]) -> None:
    then = [f"hvd.rank() or find('{A}:2 {B}:2')", f"hvd.rank() or find('{B}:2')"]
    options = ["-np", "2", "--min-np", "2", "--reset-limit", "2", "--verbose", *finds(f"{A}:2")]
    done = horovodrun(*options, *follows([2, 4, 2], then))
    assert done.returncode == 0, done.stderr
    assert "spare process" not in done.stderr, "those that wait to be taken in are none"
    # Either of the two may have come a world earlier than the other.
    assert took(done.stdout) in ([f"0 2 2 {B} 4", f"1 2 3 {B} 4"], [f"0 2 3 {B} 4", f"1 2 2 {B} 4"])
    assert len(re.findall(f"enters . {A} ", done.stdout)) in (4, 6), "in two worlds, or three if newcomers come apart"
    assert f"Host {B} with 2 slots came." in done.stderr
    assert f"Host {A} went." in done.stderr


def test_a_host_whose_slots_change_keeps_its_agent(
    horovodrun: Run, finds: Callable[..., list[str]], follows: Callable[..., list[str]]
) -> None:
    then = [f"hvd.rank() or find('{A}:3')", f"hvd.rank() or find('{A}:1')"]
    options = ["-np", "2", "--min-np", "1", *finds(f"{A}:2")]
    done = horovodrun(*options, *follows([2, 3, 1], then))
    assert done.returncode == 0, done.stderr
    assert took(done.stdout) == [f"0 1 0 {A} 2"]
    assert f"Host {A} has 3 slots instead of 2." in done.stderr
    assert f"Host {A} has 1 slot instead of 3." in done.stderr
    assert "lost" not in done.stderr


def test_hosts_that_are_not_there_yet_are_waited_for(horovodrun: Run, finds: Callable[..., list[str]]) -> None:
    done = horovodrun("-np", "1", "--elastic-timeout", "1", *finds(), "true")
    assert done.returncode != 0
    assert tells(done.stderr, "--elastic-timeout", "1 s")
    assert re.search(ends_with(LaunchCode.DISCOVERY_FAILED, "only 0 are"), done.stderr.rstrip())


def test_more_changes_than_the_limit_end_the_job(
    horovodrun: Run, finds: Callable[..., list[str]], follows: Callable[..., list[str]]
) -> None:
    then = [f"hvd.rank() or find('{A}:2 {B}:2')", f"hvd.rank() or find('{B}:2')"]
    options = ["-np", "2", "--min-np", "2", "--reset-limit", "1", *finds(f"{A}:2")]
    done = horovodrun(*options, *follows([2, 4, 2], then))
    assert done.returncode == 1, done.stderr
    sentence = "Horovod was shutdown because number of resets during elastic job exceeded limit: 1"
    assert re.search(ends_with(LaunchCode.RESET_LIMIT, sentence), done.stderr.rstrip())


@pytest.mark.parametrize("dies", ["os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit(3)"])
def test_a_host_goes_with_the_process_that_fails_there(
    horovodrun: Run, finds: Callable[..., list[str]], follows: Callable[..., list[str]], dies: str
) -> None:
    options = ["-np", "4", "--min-np", "2", *finds(f"{A}:2", f"{B}:2")]
    done = horovodrun(*options, *follows([4, 2], [f"if hvd.rank() == 0: {dies}"]))
    assert done.returncode == 0, done.stderr
    assert took(done.stdout) == [f"0 2 2 {B} 4", f"1 2 3 {B} 4"]
    assert set(re.findall(r"enters .* (\d)$", done.stdout, re.MULTILINE)) == {"4", "2"}, "no world of 3 between these"
    assert f"Host {A} is set aside for good" in done.stderr


def test_a_host_that_failed_is_used_again_after_its_cooldown(
    horovodrun: Run, finds: Callable[..., list[str]], follows: Callable[..., list[str]]
) -> None:
    options = ["-np", "4", "--min-np", "2", "--max-np", "4", "--blacklist-cooldown-range", "3", "4"]
    then = ["if hvd.rank() == 0: os.kill(os.getpid(), signal.SIGKILL)", ""]
    done = horovodrun(*options, *finds(f"{A}:2", f"{B}:2"), *follows([4, 2, 4], then))
    assert done.returncode == 0, done.stderr
    assert [line.split()[3] for line in took(done.stdout)] == [B, B, A, A], "survivors hold the low ranks"
    assert f"Host {A} may be used again after a cooldown." in done.stderr


def test_where_each_host_fails_the_job_fails(
    horovodrun: Run, finds: Callable[..., list[str]], program: Program
) -> None:
    options = ["-np", "2", "--min-np", "1", *finds(f"{A}:1", f"{B}:1")]
    done = horovodrun(*options, *program("sys.exit(3)"))
    assert done.returncode == 1, done.stderr
    assert re.search(ends_with(ClusterCode.TOO_FEW_PROCESSES, A, B), done.stderr.rstrip())


def test_the_job_fails_when_no_host_is_left_on_which_it_ran(
    horovodrun: Run, finds: Callable[..., list[str]], follows: Callable[..., list[str]]
) -> None:
    options = ["-np", "1", *finds(f"{A}:1")]
    done = horovodrun(*options, *follows([1, 2], [f"find('{B}:1')"]))
    assert done.returncode == 1, done.stderr
    assert re.search(ends_with(ClusterCode.TOO_FEW_PROCESSES, A), done.stderr.rstrip())


def test_a_launcher_waits_for_enough_hosts(
    tmp_path: Path, launch: Launch, finds: Callable[..., list[str]], follows: Callable[..., list[str]]
) -> None:
    launched = launch("-np", "2", "--min-np", "1", *finds(f"{A}:1"), *follows([2], []))
    assert launched.process.stderr is not None
    assert "came" in launched.process.stderr.readline()
    (tmp_path / "hosts").write_text(f"{A}:1\n{B}:1\n")
    code, out, err = launched.finish()
    assert code == 0, err
    assert took(out) == [f"0 2 0 {A} 2", f"1 2 1 {B} 2"]


def test_a_launcher_that_is_interrupted_leaves_nothing(
    launch: Launch, finds: Callable[..., list[str]], program: Program, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\n[ -e {tmp_path}/once ] && sleep 600\ntouch {tmp_path}/once\necho {A}:1\n")
    slow.chmod(0o755)
    launched = launch(
        "-np", "1", "--host-discovery-script", str(slow), *program("print('up', flush=True)\nwait_for_signals()")
    )
    assert launched.lines(1) == ["[0]<stdout>:up"]
    family = launched.remember_family()
    while not any("sleep" in one.name() for one in family):
        family = launched.remember_family()
    launched.signal(2)
    code, _, err = launched.finish()
    assert code == 130, err
    assert not still_alive(family)
