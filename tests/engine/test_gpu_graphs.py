"""While a framework captures a CUDA graph: the engine goes on and spoils nothing, and is not part of it."""

from __future__ import annotations

import numpy as np
import pytest
from error_codes import ends_with
from gpu_world import GpuWorld, StandIns, expect_error, now, ones, start
from resources import eventually
from world import ALLGATHER

from horovod.base.errors import OperationCode


@pytest.mark.parametrize("through_the_host", [False, True])
def test_the_engine_works_while_a_graph_is_captured(libraries: StandIns, through_the_host: bool) -> None:
    """By another thread, in the mode in which CUDA forbids every thread what could spoil the graph."""
    operations = ~0 if through_the_host else 0
    with GpuWorld(libraries, 2, host_operations=operations & 0xFFFF) as world:
        held = world.gpus[1].hold()
        arrays = [[ones(member, 100), ones(member, 100)] for member in world.members]
        rows = [member.array(np.ones((2, 2), np.float32)) for member in world.members]
        captured = world.gpus[0].stream()
        with world.gpus[0].capture(captured):
            handles = [
                [start(member, array, f"allreduce.{i}") for i, array in enumerate(arrays[member.rank])]
                for member in world.members
            ]
            gathered = [
                m.start(ALLGATHER, "allgather.x", [r], [None]) for m, r in zip(world.members, rows, strict=True)
            ]
            queries = libraries.count("queries")
            assert eventually(lambda: libraries.count("queries") > queries + 10)  # somebody looks what has passed
            world.gpus[1].release(held)
            for member in world.members:
                for handle in (*handles[member.rank], gathered[member.rank]):
                    member.finish(handle)
        for one, other in arrays:
            np.testing.assert_array_equal(one.numpy(), 2.0)
            np.testing.assert_array_equal(other.numpy(), 2.0)


def test_the_caller_s_own_mode_is_left_alone(pair: GpuWorld, libraries: StandIns) -> None:
    member = pair.members[0]
    array, captured = ones(member), member.gpu.stream()
    pair.run(lambda m: m.allreduce(np.ones(4, np.float32)))
    handles = []

    def spoil() -> None:
        with member.gpu.capture(captured):
            handles.append(start(member, array))
            assert libraries.cuda.cuStreamSynchronize(None) == 900  # the thread itself has not said that it knows

    expect_error(spoil, AssertionError, "answers 901")  # invalidated
    other = pair.members[1]
    other.finish(start(other, ones(other)))
    member.finish(handles[0])


def test_what_is_captured_is_refused(pair: GpuWorld) -> None:
    """And leaves the graph as it is. The tensors' stream counts, and the one that is to wait for a result."""
    held = pair.gpus[1].hold()
    member, other = pair.members
    array, theirs = ones(member), ones(other)
    captured = member.gpu.stream()
    with member.gpu.capture(captured):
        member.current_stream = captured
        expect_error(
            lambda: start(member, array),
            ValueError,
            ends_with(OperationCode.GRAPH_CAPTURE, "allreduce.x"),
        )
        member.current_stream = 0
        handles = [start(member, array), start(other, theirs)]
        assert eventually(lambda: all(handle.done() for handle in handles))
        member.current_stream = captured
        expect_error(
            lambda: member.finish(handles[0]),
            ValueError,
            ends_with(OperationCode.GRAPH_CAPTURE, "allreduce.x"),
        )
        member.current_stream = 0
    other.finish(handles[1])
    pair.gpus[1].release(held)
    np.testing.assert_array_equal(theirs.numpy(), 2.0)
    assert eventually(lambda: now(array).tolist() == [2.0] * 4)
    pair.run(lambda m: m.allreduce(np.ones(4, np.float32), "allreduce.x"))
