"""Children that a rank starts by other means than a fork of its own: they know its place, and are no second rank."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import Program

from horovod.base.errors import WorldCode, code_of

HERE = Path(__file__).parent
CHILD = str(HERE / "child_of_a_rank.py")
CODE = str(WorldCode.CHILD_OF_RANK)

START = f"""
import multiprocessing, subprocess
sys.path.insert(0, {str(HERE)!r})
from child_of_a_rank import facts, send
from horovod.common.process_sets import ProcessSet

def by(method, given=None):
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=send, args=(theirs, given))
    child.start()
    print(ours.recv() if ours.poll(60) else "nothing", flush=True)
    child.join()

def program(*arguments, **environ):
    command = [sys.executable, {CHILD!r}, *arguments]
    done = subprocess.run(command, env={{**os.environ, **environ}}, capture_output=True, text=True)
    print(done.stdout, end="", flush=True)
"""


def said(program: Program) -> list[Any]:
    return [ast.literal_eval(line) for line in program.finish().splitlines()]


def test_children_know_the_place_of_their_rank_and_run_nothing(coordinator):
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "2"}
    script = (
        START
        + """
pair = ProcessSet([1])
hvd.init(process_sets=[pair], rank=int(os.environ["ME"]))
if hvd.rank() == 1:
    by("spawn", pair), by("forkserver", pair), program()
allreduce("after")
hvd.shutdown()
program(), by("forkserver")
"""
    )
    with Program(script, ME="1", **common) as program, Program(script, ME="0", **common) as other:
        *inside, after, and_forked = said(program)
        assert other.finish().count("False") == 2
    place = {
        "is_initialized": True,
        "place": [1, 2, 1, 2, 0, 1],
        "everyone": [1, 2, [0, 1]],
        "refused": [CODE, CODE],
    }
    assert inside == [{**place, "given": [1, 1, True, 0]}] * 2 + [place]
    assert after == and_forked == {"is_initialized": False}


def test_a_later_world_is_told_to_later_children_also_by_a_server_that_forks_them(coordinator):
    script = (
        START
        + """
hvd.init(job="a", size=1)
by("forkserver")
hvd.shutdown()
hvd.init(job="b", size=2)
by("forkserver")
allreduce("after")
"""
    )
    peer = "hvd.init(job='b', size=2); allreduce('after')"
    common = {"HOROVOD_COORDINATOR": coordinator.address}
    with Program(script, **common) as program, Program(peer, **common) as other:
        first, second = said(program)
        other.finish()
    assert first["place"][1] == 1
    assert second["place"][1] == 2


def test_programs_with_a_place_of_their_own_are_no_children():
    script = (
        START
        + """
hvd.init()
program(), program("RANK=1", "WORLD_SIZE=2"), program("HOROVOD_CLUSTER=none"), program(HOROVOD_PARENT_WORLD="")
"""
    )
    with Program(script) as program:
        child, *others = said(program)
    # The parent is a world of one without a coordinator, so a child's hvd.init() makes another one.
    assert child["is_initialized"]
    assert child["refused"] == [CODE, ""]
    assert others == [{"is_initialized": False}] * 3


def test_the_variable_counts_in_descendants_only():
    """A launcher copies it to processes that the rank has not started."""
    script = "hvd.init(); print(os.environ['HOROVOD_PARENT_WORLD'], flush=True); sys.stdin.readline()"
    with Program(script) as program:
        copied = program.line()
        with Program(f"sys.argv = ['x']; exec(open({CHILD!r}).read())", HOROVOD_PARENT_WORLD=copied) as other:
            assert said(other) == [{"is_initialized": False}]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_without_a_guard_is_told_of_it_and_the_training_goes_on(coordinator, tmp_path, method):
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import multiprocessing
from horovod.common import basics as hvd
hvd.init()
child = multiprocessing.get_context({method!r}).Process(target=print)
child.start()
child.join()
print("rank", hvd.rank(), child.exitcode)
"""
    )
    environ = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "1"}
    done = subprocess.run([sys.executable, str(script)], env={**os.environ, **environ}, capture_output=True, text=True)
    assert done.stdout == "rank 0 1\n"
    told = next(line for line in done.stderr.splitlines() if "__main__" in line and code_of(line))
    assert code_of(told) is WorldCode.CHILD_OF_RANK
