"""What an engine keeps of operations is bounded by the ids that there are, whatever names a program makes up."""

from __future__ import annotations

import re

import numpy as np
import pytest
from error_codes import ends_with
from recalling import RecallingWorld
from world import ALLGATHER, ALLREDUCE, SUM, Member

from horovod.base.errors import OperationCode

IDS = 16


@pytest.mark.parametrize("transport", ["in_process", "tcp"])
def test_names_that_are_used_once(transport: str) -> None:
    def body(member: Member) -> None:
        for number in range(150):
            handles = [
                member.allreduce_async(np.full(3, number, np.int64), f"allreduce.{number}.{part}") for part in range(4)
            ]
            for handle in handles:
                np.testing.assert_array_equal(member.wait(handle), 2 * number)
            np.testing.assert_array_equal(member.allreduce(np.ones(number % 7 + 1), "allreduce.of many shapes"), 2)

    with RecallingWorld(2, transport, IDS) as world:
        world.run(body)
        assert world.negotiator.recalls > 20
        assert [engine.known() < IDS for engine in world.engines] == [True, True]


@pytest.mark.parametrize("transport", ["in_process", "tcp"])
def test_names_that_are_used_once_are_forgotten_while_ids_are_free(transport: str) -> None:
    """Beside operations that repeat, and are in flight when their ids are recalled."""

    def body(member: Member) -> None:
        for step in range(400):
            handles = [member.allreduce_async(np.full(3, step, np.int64), f"allreduce.weight.{part}") for part in "abc"]
            np.testing.assert_array_equal(member.allreduce(np.ones(2), f"allreduce.loss.{step}", op=SUM), 2)
            for handle in handles:
                np.testing.assert_array_equal(member.wait(handle), 2 * step)

    with RecallingWorld(2, transport, usual_ids=IDS) as world:
        world.run(body)
        assert [engine.known() <= 2 * IDS + 8 for engine in world.engines] == [True, True]
        (warning,) = world.negotiator.warnings
    assert re.search(r"loss\.\d+, loss\.\d+, loss\.\d+, \.\.\.", warning)


def test_names_that_the_ranks_disagree_on() -> None:
    def body(member: Member) -> None:
        for number in range(50):
            handle = member.allreduce_async(np.ones(2 + member.rank, np.float32), f"allreduce.{number}")
            with pytest.raises(RuntimeError, match=ends_with(OperationCode.MISMATCHED)):
                handle.result()

    with RecallingWorld(2, "in_process") as world:
        world.run(body)
        assert [engine.known() for engine in world.engines] == [0, 0]


def test_unnamed_operations_of_ever_new_shapes() -> None:
    """Forgotten at the same operation by all ranks, although these are at different ones and have others in flight."""
    signatures = 512  # kUnnamedVariants in csrc/engine/lane_table.h

    def body(member: Member) -> None:
        handles = []
        for number in range(2 * signatures + 100):
            shape = (number % (signatures + 50) + 1,)
            handles.append((number, member.allreduce_async(np.full(shape, number + member.rank, np.int64))))
            # Rank 1 runs ahead of rank 0, which waits for each.
            while len(handles) > 40 * member.rank:
                first, handle = handles.pop(0)
                np.testing.assert_array_equal(member.wait(handle), 2 * first + 1)
            member.submit(ALLGATHER, "allgather.noname", [np.ones(1)], [None], wait_follows=True).result()
        for first, handle in handles:
            np.testing.assert_array_equal(member.wait(handle), 2 * first + 1)
        for _ in range(40):  # what is known runs as ever
            np.testing.assert_array_equal(member.allreduce(np.ones(7), op=SUM), 2)

    with RecallingWorld(2, "in_process", 64) as world:
        world.run(body)
        # The latest signatures have a lane each, and the last one and allgather's 32.
        assert all(engine.known() <= signatures + 64 + 64 for engine in world.engines), ALLREDUCE
        assert len({engine.known() for engine in world.engines}) == 1
