"""HOROVOD_NUM_NCCL_STREAMS: batches take turns on so many streams, each with a communicator of its own.

A batch that stands still shows which others are on its stream: they wait behind it, and those on other streams do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu_world import DeviceArray, GpuMember, GpuWorld, StandIns, now
from resources import eventually
from world import ALLREDUCE, MAX, SUM

STREAMS = 3
COUNT = 10


class Batches:
    """Operations that are batches of their own, queued on every rank's device when a call returns."""

    def __init__(self, world: GpuWorld) -> None:
        self.world = world
        self.streams = [0] * world.size  # of the framework
        for number in range(STREAMS):  # the names are agreed on, and the communicators made
            self.reduce(f"allreduce.{number}", self.arrays())
        self.reduce("allreduce.max", self.arrays(), MAX)
        for _ in range(2 * STREAMS - 4):
            self.reduce("allreduce.0", self.arrays())  # the next one is the first stream's again

    def arrays(self) -> list[DeviceArray]:
        """Rank r has r + 1 everywhere, on a stream of the framework's that waits for nothing else."""
        self.streams = [gpu.stream() for gpu in self.world.gpus]
        made = []
        for rank, (gpu, stream) in enumerate(zip(self.world.gpus, self.streams, strict=True)):
            made.append(gpu.array(np.full(COUNT, rank + 1, np.float32), stream))
            gpu.synchronize(stream)
        return made

    def reduce(self, name: str, arrays: list[DeviceArray], op: int = SUM) -> list[DeviceArray]:
        """In place; the framework's streams wait for it."""

        def body(member: GpuMember) -> None:
            array = arrays[member.rank]
            member.current_stream = array.stream
            member.finish(member.start(ALLREDUCE, name, [array], [array], reduce_op=op))

        self.world.run(body)
        return arrays


def all_are(value: float, *batches: list[DeviceArray]) -> bool:
    return all(bool((now(array) == value).all()) for arrays in batches for array in arrays)


def test_batches_take_turns_and_keep_their_order(libraries: StandIns) -> None:
    before = libraries.count("communicators")
    options: dict[str, Any] = {"nccl_streams": STREAMS, "fusion_threshold_bytes": 0}
    with GpuWorld(libraries, 2, **options) as world:
        batches = Batches(world)
        still = batches.arrays()
        held = world.gpus[1].hold(batches.streams[1])
        batches.reduce("allreduce.0", still)  # first stream: rank 0's part waits for that of rank 1
        on_second = batches.reduce("allreduce.1", batches.arrays())
        on_third = batches.reduce("allreduce.2", batches.arrays())
        assert eventually(lambda: all_are(3.0, on_second, on_third))
        tensor = batches.reduce("allreduce.1", batches.arrays())  # first stream, behind the one that stands still
        # Second stream, which is free: what holds it back is that its input comes after the operation before, for which
        # the framework's stream waits.
        batches.reduce("allreduce.max", tensor, MAX)
        after_both = batches.reduce("allreduce.2", batches.arrays())
        assert eventually(lambda: all_are(3.0, after_both))
        assert [now(array).tolist() for array in (*still, *tensor)] == 2 * [[1.0] * COUNT, [2.0] * COUNT]
        world.gpus[1].release(held)
        for array in (*still, *tensor):  # the maximum of what came first would have become 4 later
            np.testing.assert_array_equal(array.numpy(), 3.0)
        assert libraries.count("communicators") == before + 2 * STREAMS
