"""Forked children of an initialized process: they know its place, can't use its world, and disturb no other process."""

from __future__ import annotations

import os
import re
import signal

import pytest
from error_codes import ends_with
from runtime_harness import Program

from horovod.base.errors import EngineCode, code_of

CHILD_IS_TOLD = """
from horovod.common.process_sets import global_process_set

def everyone():
    return global_process_set.rank(), global_process_set.size(), global_process_set.included()

hvd.init()
pid = os.fork()
if pid == 0:
    print(hvd.is_initialized(), hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size(), everyone(), flush=True)
    try:
        allreduce("child")
    except ValueError as error:
        print(error, flush=True)
    hvd.shutdown()
    print(hvd.is_initialized(), flush=True)
    sys.exit(0)          # an ordinary end, with atexit and destructors
print("status", os.waitpid(pid, 0)[1], flush=True)
print("still", allreduce("after"), flush=True)
"""


def test_a_child_of_a_world_of_one_is_told_and_may_start_its_own():
    script = CHILD_IS_TOLD.replace("    sys.exit(0)", "    hvd.init(); print(hvd.size(), flush=True)\n    sys.exit(0)")
    with Program(script) as program:
        facts, told, after, size, status, still = program.finish().splitlines()
    assert facts == "True 0 1 0 1 (0, 1, True)"
    assert re.search(ends_with(EngineCode.FORKED_CHILD, program.process.pid), told)
    assert after == "False"
    assert (size, status, still) == ("1", "status 0", "still 1.0")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_child_does_not_disturb_its_world(coordinator, transport):
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "2", "HOROVOD_TRANSPORT": transport}
    peer = "hvd.init(); print('still', allreduce('after'), allreduce('after'))"
    script = CHILD_IS_TOLD + "allreduce('after')"
    with Program(script, **common) as program, Program(peer, **common) as other:
        facts, told, after, status, still = program.finish().splitlines()
        assert other.finish() == "still 2.0 2.0"
    assert facts.replace(" (1", " (0") in ("True 0 2 0 1 (0, 2, True)", "True 1 2 1 1 (0, 2, True)")
    assert code_of(told) is EngineCode.FORKED_CHILD
    assert after == "False"
    assert (status, still) == ("status 0", "still 2.0")


def test_a_child_cannot_join_a_world(coordinator):
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "1"}
    script = """
hvd.init()
if os.fork() == 0:
    try:
        hvd.init()
    except ValueError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    with Program(script, **common) as program:
        assert re.search(ends_with(EngineCode.FORKED_CHILD, program.process.pid), program.finish())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_peers_notice_a_killed_parent_whose_child_lives_on(coordinator, transport):
    """The child has copies of the parent's connections; they must not keep the dead parent alive for its peers."""
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "2", "HOROVOD_TRANSPORT": transport}
    parent = """
hvd.init()
allreduce("ready")
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
signal.pause()
"""
    peer = """
hvd.init()
allreduce("ready")
print("ready", flush=True)
try:
    allreduce("ready")
except HorovodInternalError as error:
    print(error)
"""
    with Program(parent, **common) as program, Program(peer, **common) as other:
        child = int(program.line())
        assert other.line() == "ready"  # the parent may have been the first to have the sum
        try:
            os.kill(program.process.pid, signal.SIGKILL)
            assert f"(pid {program.process.pid})" in other.finish()
            assert os.path.exists(f"/proc/{child}")  # it was there all the time
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_does_not_keep_the_proof_of_its_parents_world(coordinator):
    script = """
from horovod.worker.runtime import context
hvd.init()
assert context._epochs._last.world.rank == 0
if os.fork() == 0:
    print(context._epochs._last, flush=True)
    os._exit(0)
os.wait()
"""
    with Program(script, HOROVOD_COORDINATOR=coordinator.address, HOROVOD_SIZE="1") as program:
        assert program.finish() == "None"
