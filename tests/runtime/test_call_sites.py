"""HOROVOD_CHECK_CALL_SITES: unnamed operations that ranks call from different lines are an error on all of them."""

from __future__ import annotations

from runtime_harness import Program

from horovod.base.errors import OperationCode, code_of

# Only rank 0 calls the first one, which would pair up with the second one of rank 1.
SCRIPT = """
from horovod.common.ops.collectives import barrier
from horovod.common.process_sets import global_process_set as everyone

def log():
    barrier(everyone)

def measure():
    barrier(everyone)

hvd.init()
for step in range(3):
    measure()
allreduce("named")
try:
    if hvd.rank() == 0:
        log()
    measure()
    print("no error")
except ValueError as error:
    print(error)
"""


def _said(coordinator, **environ: str) -> list[str]:
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "2", **environ}
    with Program(SCRIPT, HOROVOD_RANK="0", **common) as first, Program(SCRIPT, HOROVOD_RANK="1", **common) as second:
        return [first.finish(), second.finish()]


def test_ranks_that_call_from_different_lines_are_told_of_both(coordinator):
    for text in _said(coordinator, HOROVOD_CHECK_CALL_SITES="1"):
        assert code_of(text) is OperationCode.CALL_SITES_DIFFER
        for fact in ("rank 0 from barrier at", "in log", "rank 1 from barrier at", "in measure"):
            assert fact in text


def test_nothing_stands_before_the_engine_without_the_setting(coordinator):
    script = "hvd.init(); print(type(current().engine).__name__)"
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "1"}
    with Program(script, **common) as program:
        assert program.finish() == "Engine"
