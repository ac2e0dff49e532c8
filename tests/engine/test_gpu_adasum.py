"""Adasum of GPU tensors: the mean of each host's ranks by NCCL, then Adasum of the hosts; the CPU's without NCCL."""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence

import numpy as np
import pytest
from adasum_reference import adasum, gradient
from error_codes import ends_with
from gpu_world import GpuMember, GpuWorld, StandIns, ended
from resources import eventually
from world import ADASUM, ALLREDUCE, BARRIER, SPARSE, SUM

from horovod._core import OpSpec
from horovod.base.errors import EngineCode

CHUNK = 64 << 10
COUNTS = (0, 1, 5, 1000, 50_003)
ONE_HOST = [0, 0, 0, 0]
PLACEMENTS = [ONE_HOST, [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 2, 0], [0, 1, 2], [0, 0, 0, 1]]


def by_host(vectors: Sequence[np.ndarray], placement: Sequence[int]) -> np.ndarray:
    """Hosts in the order of their first ranks."""
    groups: dict[int, list[np.ndarray]] = {}
    for vector, host in zip(vectors, placement, strict=True):
        groups.setdefault(host, []).append(vector)
    return adasum([np.mean(group, axis=0) for group in groups.values()])


def world_of(libraries: StandIns, placement: Sequence[int], transport: str, **options: int) -> GpuWorld:
    """tcp, sparse: where ranks of a host share no memory."""
    where = {"hosts": placement} if "hosts" in transport else {"placement": placement}
    return GpuWorld(libraries, len(placement), transport, staging_bytes=CHUNK, **where, **options)  # type: ignore[arg-type]


# The first ranks of two hosts of three are no neighbours in the circle of six.
SPARSE_CASES = [(placement, transport) for placement in ([0, 0, 0, 1, 1, 1], [0, 1, 1, 2, 0]) for transport in SPARSE]


@pytest.mark.parametrize(
    ("placement", "transport"),
    [*((placement, transport) for placement in PLACEMENTS for transport in ("tcp", "hosts")), *SPARSE_CASES],
    ids=str,
)
def test_against_the_definition(libraries: StandIns, placement: list[int], transport: str) -> None:
    def body(member: GpuMember) -> list[bytes]:
        bits = []
        for count in COUNTS:
            for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5), ("float16", 2e-2)):
                inputs = [gradient(rank, count).astype(dtype).astype("float64") for rank in range(member.size)]
                got = member.allreduce(gradient(member.rank, count).astype(dtype), f"allreduce.{count}{dtype}", ADASUM)
                expected = by_host(inputs, placement)
                np.testing.assert_allclose(got.astype("float64"), expected, rtol=tolerance, atol=tolerance)
                bits.append(got.tobytes())
        return bits

    with world_of(libraries, placement, transport) as world:
        first, *others = world.run(body)
        assert all(bits == first for bits in others)
        assert not world.negotiator.notes


def test_where_all_share_memory_it_is_the_mean(libraries: StandIns) -> None:
    """Whatever the placement says. It needs no other communicator, and nothing leaves the devices."""
    with GpuWorld(libraries, 3, "in_process", placement=[0, 1, 1]) as world:
        libraries.record()
        before = libraries.count("communicators")
        for got in world.run(lambda m: m.allreduce(np.full(100_000, 3.0 * m.rank), op=ADASUM)):
            np.testing.assert_array_equal(got, 3.0)
        assert libraries.count("communicators") == before + 3
        assert not libraries.recorded()
        assert libraries.count("pinned") == 0


def test_what_it_needs_is_made_with_the_first_one(libraries: StandIns) -> None:
    with world_of(libraries, [0, 0, 1], "hosts") as world:
        world.run(lambda m: m.allreduce(np.ones(10)))
        before = {name: libraries.count(name) for name in ("streams", "communicators")}
        world.run(lambda m: m.allreduce(np.ones(10), op=ADASUM))
        # NCCL's stream for each rank, and two for each first rank of a host; one communicator for each host's members.
        assert libraries.count("streams") == before["streams"] + 3 + 2 * 2
        assert libraries.count("communicators") == before["communicators"] + 3
        world.run(lambda m: m.allreduce(np.ones(10), op=ADASUM))
        assert libraries.count("streams") == before["streams"] + 7


def test_only_first_ranks_of_hosts_use_the_host_s_memory(libraries: StandIns) -> None:
    with world_of(libraries, [0, 1, 0, 1], "hosts") as world:
        arrays = [member.array(np.full(50_000, 1.0 + member.rank)) for member in world.members]
        libraries.record()

        def body(member: GpuMember) -> None:
            array = arrays[member.rank]
            member.finish(member.start(ALLREDUCE, "allreduce.x", [array], [array], reduce_op=ADASUM))
            member.gpu.synchronize(member.current_stream)

        world.run(body)
        moved = {(device, way) for device, way, *_ in libraries.recorded()}
        assert moved == {(0, "in"), (0, "out"), (1, "in"), (1, "out")}


def test_factors_and_groups_of_several_types(libraries: StandIns) -> None:
    placement = [0, 0, 1]
    kinds = [("float32", 7), ("float64", 9000), ("float32", 3000)]

    def body(member: GpuMember) -> None:
        arrays = [gradient(member.rank, count).astype(dtype) for dtype, count in kinds]
        options = {"reduce_op": ADASUM, "prescale": 0.5, "postscale": 3.0}
        handle = member.submit(ALLREDUCE, "grouped_allreduce.a", arrays, list(arrays), **options)
        for got, (dtype, count) in zip(member.wait(handle), kinds, strict=True):
            inputs = [gradient(rank, count).astype(dtype).astype("float64") for rank in range(member.size)]
            np.testing.assert_allclose(got, 1.5 * by_host(inputs, placement), rtol=1e-4, atol=1e-5)

    with world_of(libraries, placement, "hosts") as world:
        world.run(body)


def test_one_rank_without_nccl_decides_for_all(libraries: StandIns) -> None:
    """Then it is what it is in the host's memory: of every rank with every other."""
    with GpuWorld(libraries, 3, "hosts", without_nccl=[1], hosts=[0, 0, 1], staging_bytes=CHUNK) as world:
        expected = adasum([gradient(rank, 5000) for rank in range(3)])
        for got in world.run(lambda m: m.allreduce(gradient(m.rank, 5000), op=ADASUM)):
            np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_an_error_of_nccl_ends_the_wait_between_hosts(libraries: StandIns) -> None:
    """The first rank of a host waits there for the first of another one, whose tensor is behind what stands still."""
    with world_of(libraries, [0, 1, 0, 1], "hosts") as world:
        world.run(lambda m: m.allreduce(np.ones(1000), "allreduce.good", ADASUM))
        held = world.gpus[1].hold()
        arrays = [member.array(np.ones(1000)) for member in world.members]
        for member, array in zip(world.members, arrays, strict=True):
            member.start(ALLREDUCE, "allreduce.adasum", [array], [array], reduce_op=ADASUM)
        assert eventually(lambda: all(engine.counters()["batches"] == 2 for engine in world.engines))
        libraries.fail("ncclCommGetAsyncError@0", 3)
        assert eventually(lambda: all(ended(engine) is not None for engine in world.engines))
        for engine in world.engines:
            assert re.search(ends_with(EngineCode.NCCL_FAILED, "ncclCommGetAsyncError"), ended(engine) or "")
        world.gpus[0].synchronize()
        world.gpus[1].release(held)


@pytest.mark.parametrize("function", ["ncclAllReduce", "ncclBroadcast", "cuMemcpyDtoHAsync_v2"])
def test_a_failure_in_any_step_ends_the_epoch_everywhere(libraries: StandIns, function: str) -> None:
    with world_of(libraries, [0, 0, 1, 1], "hosts") as world:
        world.run(lambda m: m.allreduce(np.ones(1000), "allreduce.good", ADASUM))
        arrays = [member.array(np.ones(1000)) for member in world.members]
        libraries.fail(function, 1)

        def steps(member: GpuMember) -> None:
            for step in range(100):
                own = [arrays[member.rank]]
                member.finish(member.start(ALLREDUCE, f"allreduce.{step}", own, list(own), reduce_op=ADASUM))
                member.engine.submit(OpSpec(BARRIER), "barrier.noname", []).result()

        def body(member: GpuMember) -> str:
            with pytest.raises(RuntimeError) as raised:
                steps(member)
            return str(raised.value)

        for error in world.run(body):
            code = EngineCode.NCCL_FAILED if function.startswith("nccl") else EngineCode.GPU_FAILED
            assert re.search(ends_with(code, function), error)
        for member in world.members:
            member.gpu.synchronize()  # nothing hangs there


def test_a_failure_ends_all_that_waits_on_its_device(libraries: StandIns) -> None:
    """The end of one communicator of NCCL waits for all kernels of the device, also for those of the others."""
    with world_of(libraries, [0, 1, 0, 1], "hosts") as world:
        arrays = {name: [member.array(np.ones(1000)) for member in world.members] for name in ("sum", "adasum")}

        def start(member: GpuMember, name: str) -> None:
            own = [arrays[name][member.rank]]
            member.start(ALLREDUCE, f"allreduce.{name}", own, list(own), reduce_op=ADASUM if name == "adasum" else SUM)

        for op in (SUM, ADASUM):  # so that there are communicators
            world.run(lambda m, op=op: m.allreduce(np.ones(4), f"allreduce.good.{op}", op))
        side = world.members[1].current_stream = world.gpus[1].stream()
        held = world.gpus[1].hold(side)  # the sum waits for its part
        world.run(lambda m: start(m, "sum"))
        world.members[1].current_stream = 0
        libraries.fail("cuMemcpyDtoHAsync_v2", 1)
        world.run(lambda m: start(m, "adasum"))
        for engine in world.engines:
            assert eventually(lambda engine=engine: "cuMemcpyDtoHAsync_v2 failed" in (ended(engine) or ""))
        for rank in (0, 2, 3):
            world.gpus[rank].synchronize()
        world.gpus[1].release(held)
        world.gpus[1].synchronize(side)
        arrays.clear()
        gc.collect()


def test_a_rank_that_gives_up_frees_those_that_wait_for_its_host(libraries: StandIns) -> None:
    """Rank 0 speaks for its host, whose other ranks wait on their devices for what it brings."""
    with world_of(libraries, [0, 0, 1, 1], "hosts") as world:
        world.run(lambda m: m.allreduce(np.ones(1000), "allreduce.good", ADASUM))
        held = world.gpus[2].hold()  # so the other host has no mean
        arrays = [member.array(np.ones(1000)) for member in world.members]
        handles = [
            member.start(ALLREDUCE, "allreduce.x", [array], [array], reduce_op=ADASUM)
            for member, array in zip(world.members, arrays, strict=True)
        ]
        assert eventually(handles[1].done)
        world.engines[3].abort("rank 3 on host here gave up.")
        others = (0, 1, 3)  # NCCL waits for the kernel of rank 2, which waits for its turn
        assert eventually(lambda: all(ended(world.engines[rank]) for rank in others))
        for rank in others:
            with pytest.raises(RuntimeError, match="rank 3 on host here gave up"):
                world.members[rank].finish(handles[rank])
            world.gpus[rank].synchronize()
        world.gpus[2].release(held)
        assert eventually(lambda: ended(world.engines[2]) is not None)
        world.gpus[2].synchronize()
        del arrays, handles
        gc.collect()


def test_twenty_worlds_leave_nothing(libraries: StandIns) -> None:
    def cycle(well: bool) -> None:
        with world_of(libraries, [0, 0, 1], "hosts") as world:
            world.run(lambda m: m.allreduce(np.ones(50_000), op=ADASUM))
            if not well:
                world.engines[0].abort("rank 0 on host here gave up.")

    libraries.check_nothing_is_left(cycle)
