"""A rank whose program ends while others wait for it: they are told which one, how far it was, and of hvd.join()."""

from __future__ import annotations

import pytest
from runtime_harness import Program, allreduce, allreduce_all, world

from horovod.base.errors import OperationCode, code_of
from horovod.worker.runtime.epoch import end


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_has_more_batches_is_told_who_ended_and_how_far_it_was(coordinator, transport):
    with world(coordinator.address, 2, transport=transport) as contexts:
        for step in range(3):
            allreduce_all(contexts, f"step.{step}")
        end(contexts[0], "its program ended")
        with pytest.raises(RuntimeError) as told:
            allreduce(contexts[1], "step.3")
    for fact in ("ank 0", "after 3 operations", "hvd.join()", "drop_last"):
        assert fact in str(told.value)
    assert code_of(told.value) is OperationCode.SHUT_DOWN


@pytest.mark.parametrize("how", [{"failed": True}, {"returns": True}])
def test_a_rank_that_failed_or_comes_back_had_not_fewer_batches(coordinator, how):
    with world(coordinator.address) as contexts:
        allreduce_all(contexts, "step")
        end(contexts[0], "its program ended with an error", **how)
        with pytest.raises(RuntimeError) as told:
            allreduce(contexts[1], "next")
    assert "hvd.join()" not in str(told.value)


def test_who_waits_in_an_unnamed_operation_is_told_how_many_each_has_run(coordinator):
    with world(coordinator.address) as contexts:
        for _ in range(3):
            allreduce_all(contexts, "noname")
        allreduce_all(contexts, "named")
        end(contexts[0], "its program ended")
        with pytest.raises(RuntimeError) as told:
            allreduce(contexts[1], "noname")
    for fact in ("ank 0", "after 4 operations", "3 of allreduce.noname", "number 4 of that name", "CHECK_CALL_SITES"):
        assert fact in str(told.value)
    assert code_of(told.value) is OperationCode.SHUT_DOWN


def test_the_last_line_is_told_where_lines_are_compared(coordinator):
    script = """
from horovod.common.ops.collectives import barrier
from horovod.common.process_sets import global_process_set as everyone

def log():
    barrier(everyone)

hvd.init()
log()
if hvd.rank() == 0:
    try:
        log()
    except HorovodInternalError as error:
        print(error)
"""
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "2", "HOROVOD_CHECK_CALL_SITES": "1"}
    with Program(script, HOROVOD_RANK="0", **common) as waits, Program(script, HOROVOD_RANK="1", **common) as ends:
        ends.finish()
        text = waits.finish()
    for fact in ("ank 1", "1 of barrier.noname, the last at ", ", in log"):
        assert fact in text
    assert code_of(text) is OperationCode.SHUT_DOWN


def test_a_report_of_a_rank_that_waits_counts_unnamed_operations(coordinator):
    with world(coordinator.address) as contexts:
        allreduce_all(contexts, "named")
        for _ in range(40):  # more than the coordinator hears of
            allreduce_all(contexts, "noname")
        assert contexts[0].engine.blocked_report().unnamed == {(0, "allreduce.noname"): 40}
