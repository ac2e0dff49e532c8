"""A rank whose program ends while others wait for it: they are told which one, how far it was, and of hvd.join()."""

from __future__ import annotations

import pytest
from runtime_harness import allreduce, allreduce_all, world

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
