"""Launched ranks that wait for one that is late: what the user reads, and how the job ends.

The late rank comes when the waiting one has seen what the test is about, so nothing here depends on time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import tiers

Run = Callable[..., CompletedProcess[str]]
Program = Callable[[str], list[str]]

STEM = (
    "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for "
    "remainder of ranks for more than 0.5 seconds."
)
PRELUDE = """
import logging, threading
from array import array
from horovod._core import OpSpec
from horovod.common import basics as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.worker.runtime.context import current

fifo, used_before, came = os.environ["FIFO"], os.environ["USED_BEFORE"] == "1", False

def allreduce(name):
    data = array("f", [1.0])
    pointer = data.buffer_info()[0]
    engine = current().engine
    handle = engine.submit(OpSpec(0), "allreduce." + name, [(pointer, pointer, 7, (1,))])
    while os.environ["POLLS"] == "1" and not handle.done():  # no thread waits for it
        threading.Event().wait(0.01)
    handle.result()
    return data[0]

def the_other_may_come():
    global came
    if not came:  # a FIFO without a reader would stop the thread
        came = True
        open(fifo, "w").close()

def when_logged(words, act):
    # A filter: with a handler, logging would no longer print by itself.
    def look(record):
        if words in record.getMessage():
            act()
        return True
    logging.getLogger("horovod.worker.runtime.negotiator").addFilter(look)

hvd.init()
if used_before:
    allreduce("weights")
"""
WARNED = """
over = threading.Event()
if rank == 0:
    when_logged("Missing ranks:", the_other_may_come)
    when_logged("The stall is over", over.set)
else:
    open(fifo).close()
print(allreduce("weights"))
if rank == 0:
    over.wait()
hvd.shutdown()
"""
SHUT_DOWN = """
def until_it_fails():
    try:
        while True:  # over shared memory the late rank may still find all that it needs for one operation
            allreduce("weights")
    except HorovodInternalError as error:
        print(error)

if rank == 0:
    until_it_fails()
    the_other_may_come()
else:
    open(fifo).close()
    until_it_fails()
hvd.shutdown()
"""
DISABLED = """
if rank == 0:
    negotiator = current().negotiator
    add = negotiator._add
    def look(items):
        for kind, item in items:
            if kind == "blocked" and item[-1] > 4 * float(os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"]):
                the_other_may_come()
        add(items)
    negotiator._add = look
else:
    open(fifo).close()
print(allreduce("weights"))
hvd.shutdown()
"""

WARNED_BY_0 = "[0]<stderr>:horovod rank 0 WARNING: "
CASES = pytest.mark.parametrize(
    ("transport", "used_before"),
    [
        pytest.param(transport, used_before, id=f"{transport}-{'steady' if used_before else 'first use'}")
        for transport, used_before in tiers.pick([("shm", False), ("tcp", True)], [("shm", True), ("tcp", False)])
    ],
)


@pytest.fixture
def run(horovodrun: Run, program: Program, tmp_path: Path) -> Callable[..., CompletedProcess[str]]:
    def start(
        source: str, transport: str, used_before: bool, *flags: str, polls: bool = False
    ) -> CompletedProcess[str]:
        environ = {
            "HOROVOD_TRANSPORT": transport,
            "USED_BEFORE": str(int(used_before)),
            "POLLS": str(int(polls)),
        }
        environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "0.5"
        environ["HOROVOD_LOG_HIDE_TIME"] = "1"
        environ["FIFO"] = str(tmp_path / "fifo")
        os.mkfifo(environ["FIFO"])
        return horovodrun("-np", "2", *flags, *program(PRELUDE + source), environ=environ)

    return start


@pytest.mark.longer
@CASES
@pytest.mark.parametrize("polls", tiers.some([False, True], 1), ids=lambda polls: "polls" if polls else "waits")
def test_rank_0_tells_who_is_late_until_it_comes(run: Run, transport: str, used_before: bool, polls: bool) -> None:
    done = run(WARNED, transport, used_before, polls=polls)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:2.0", "[1]<stdout>:2.0"]
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"{WARNED_BY_0}{STEM}")
    assert lines[1:3] == ["[0]<stderr>:Missing ranks:", "[0]<stderr>:1: [allreduce.weights]"]
    assert lines[-1] == f"{WARNED_BY_0}The stall is over: no tensor waits for missing ranks any more."
    assert all(line.startswith("[0]<stderr>:") for line in lines), "the launcher does not say it again"


@pytest.mark.longer
@CASES
@pytest.mark.parametrize("polls", tiers.some([False, True], 1), ids=lambda polls: "polls" if polls else "waits")
def test_every_rank_fails_after_the_shutdown_time(run: Run, transport: str, used_before: bool, polls: bool) -> None:
    done = run(SHUT_DOWN, transport, used_before, "--stall-check-shutdown-time-seconds", "1", polls=polls)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")]
        assert "1 second" in lines[0]
        assert lines[2].startswith(f"[{rank}]<stdout>:1!: [allreduce.weights]")
    assert STEM in done.stderr


@pytest.mark.longer
@CASES
def test_nothing_is_said_when_the_check_is_disabled(run: Run, transport: str, used_before: bool) -> None:
    done = run(DISABLED, transport, used_before, "--no-stall-check", "--stall-check-shutdown-time-seconds", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:2.0", "[1]<stdout>:2.0"]


def test_a_shutdown_before_the_warning_is_ignored_in_words(run: Run) -> None:
    done = run("allreduce('x')\nhvd.shutdown()", "shm", False, "--stall-check-shutdown-time-seconds", "0.125")
    assert done.returncode == 0
    assert done.stderr.startswith(f"{WARNED_BY_0}HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=0.125 ")
