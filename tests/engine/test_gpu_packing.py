"""Small GPU tensors that share a buffer: the results are those of tensors that don't, to the last bit.

Which tensors are packed and how they are copied is tested in tests/native/gpu_packing_test.cc.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiers
from gpu_world import DeviceArray, GpuMember, GpuWorld, StandIns, ended, read
from resources import eventually
from world import ALLREDUCE, AVERAGE, BARRIER, BROADCAST, MAX, MIN, PRODUCT, SUM

from horovod._core import OpSpec

COUNTS = (1, 0, 3, 64, 1000, 7, 7, 20_000, 1, 255, 4097, 2, 0, 16, 5000)
DTYPES_OF_NUMBERS = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64")
WAYS = {
    "apart": {"gpu_pack_threshold_bytes": 0},
    "kernel": {"gpu_pack_threshold_bytes": 100_000, "gpu_pack_count": 2},
    "copies": {"gpu_pack_threshold_bytes": 100_000, "gpu_pack_count": 2, "batched_copies": 0},
    "some": {"gpu_pack_threshold_bytes": 2000, "gpu_pack_count": 4, "fusion_threshold_bytes": 6000},
}


@pytest.fixture(
    scope="module",
    params=tiers.some([(3, "in_process"), (2, "in_process"), (2, "tcp")], 2),
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def worlds(request: pytest.FixtureRequest, libraries: StandIns) -> Iterator[dict[str, GpuWorld]]:
    size, transport = request.param
    made = {way: GpuWorld(libraries, size, transport, **options) for way, options in WAYS.items()}
    yield made
    for world in made.values():
        world.__exit__()


@pytest.fixture
def pair(libraries: StandIns) -> Iterator[GpuWorld]:
    with GpuWorld(libraries, 2, **WAYS["kernel"]) as made:
        yield made


class View:
    """A tensor somewhere in the memory of another, at any address that its elements allow."""

    def __init__(self, member: GpuMember, values: np.ndarray, offset: int) -> None:
        whole = np.zeros(offset + values.nbytes + 16, np.uint8)
        whole[offset : offset + values.nbytes] = np.frombuffer(values.tobytes(), np.uint8)
        self.whole = member.array(whole)
        self.before = whole
        self.offset = offset
        self.address, self.dtype, self.shape = self.whole.address + offset, values.dtype, values.shape

    def numpy(self) -> np.ndarray:
        self.whole.gpu.synchronize(self.whole.stream)
        after = read(self.whole.address, np.dtype(np.uint8), self.before.shape)
        end = self.offset + int(np.prod(self.shape)) * self.dtype.itemsize
        np.testing.assert_array_equal(after[: self.offset], self.before[: self.offset])
        np.testing.assert_array_equal(after[end:], self.before[end:])
        return read(self.address, self.dtype, self.shape)


def numbers(rank: int, count: int, dtype: str, seed: int) -> np.ndarray:
    """Such that rounding and order matter."""
    random = np.random.default_rng([rank, count, seed])
    if dtype == "bool" or np.issubdtype(np.dtype(dtype), np.integer):
        return random.integers(0, 2 if dtype == "bool" else 5, count).astype(dtype)
    return random.uniform(0.5, 1.5, count).astype(dtype)


def reduce_group(member: GpuMember, kinds: list[str], name: str, apart: bool, **options: Any) -> list[np.ndarray]:
    """The results of a group of uneven tensors, whose dtypes take turns, at odd addresses."""
    views, into = [], []
    for i, count in enumerate(COUNTS):
        values = numbers(member.rank, count, kinds[i % len(kinds)], i)
        views.append(View(member, values, values.dtype.itemsize * (i % 5)))
        into.append(View(member, np.zeros_like(values), values.dtype.itemsize * (i % 3)) if apart else views[-1])
    kind = options.pop("kind", ALLREDUCE)
    assert member.finish(member.start(kind, name, views, into, **options)) is None  # type: ignore[arg-type]
    if apart:
        for i, view in enumerate(views):
            np.testing.assert_array_equal(view.numpy(), numbers(member.rank, COUNTS[i], kinds[i % len(kinds)], i))
    return [view.numpy() for view in into]


def compare(worlds: dict[str, GpuWorld], *arguments: Any, **options: Any) -> None:
    results = {way: world.run(lambda m: reduce_group(m, *arguments, **options)) for way, world in worlds.items()}
    for way in WAYS:
        for mine, expected in zip(results[way], results["apart"], strict=True):
            for got, wanted in zip(mine, expected, strict=True):
                assert got.tobytes() == wanted.tobytes(), way


@pytest.mark.longer
@pytest.mark.parametrize("op", [AVERAGE, SUM, MIN, MAX, PRODUCT])
@pytest.mark.parametrize("dtype", DTYPES_OF_NUMBERS)
def test_allreduce_gives_the_same_bits(worlds: dict[str, GpuWorld], dtype: str, op: int) -> None:
    compare(worlds, [dtype], f"grouped.{dtype}.{op}", False, reduce_op=op)
    compare(worlds, [dtype], f"grouped.apart.{dtype}.{op}", True, reduce_op=op)


@pytest.mark.longer
@pytest.mark.parametrize("op", [SUM, MIN])
def test_bool(worlds: dict[str, GpuWorld], op: int) -> None:
    compare(worlds, ["bool"], f"grouped.bool.{op}", False, reduce_op=op)


@pytest.mark.longer
@pytest.mark.parametrize("op", [SUM, AVERAGE, MAX, PRODUCT])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_factors_give_the_same_bits(worlds: dict[str, GpuWorld], dtype: str, op: int) -> None:
    for apart in (False, True):
        compare(worlds, [dtype], f"grouped.{apart}.{dtype}.{op}", apart, reduce_op=op, prescale=0.3, postscale=1.7)


def test_a_group_of_several_dtypes(worlds: dict[str, GpuWorld]) -> None:
    for apart in (False, True):
        compare(worlds, ["float32", "int64", "float16", "uint8"], f"grouped.mixed.{apart}", apart, reduce_op=SUM)


def test_broadcast_from_every_root(worlds: dict[str, GpuWorld]) -> None:
    for root in range(worlds["apart"].size):
        for apart in (False, True):
            name = f"broadcast.group.{root}.{apart}"
            kinds = ["float32", "int16", "bool", "float64"]
            compare(worlds, kinds, name, apart, kind=BROADCAST, root=root)


def test_operations_of_their_own_are_packed_together(worlds: dict[str, GpuWorld]) -> None:
    def body(member: GpuMember) -> None:
        for step in range(3):
            arrays = [np.full(10 + i, i + member.rank + step, np.float32) for i in range(40)]
            handles = [member.allreduce_async(array, f"allreduce.{i}") for i, array in enumerate(arrays)]
            for i, handle in enumerate(handles):
                np.testing.assert_array_equal(member.wait(handle), sum(i + r + step for r in range(member.size)))

    for world in worlds.values():
        world.run(body)


def group(member: GpuMember, name: str, count: int = 20, elements: int = 50, **where: int) -> list[DeviceArray]:
    arrays = [member.array(np.full(elements, member.rank + 1 + i, np.float32)) for i in range(count)]
    member.finish(member.start(ALLREDUCE, name, arrays, list(arrays), reduce_op=SUM, **where))
    return arrays


def check(arrays: list[DeviceArray]) -> None:
    for i, array in enumerate(arrays):
        np.testing.assert_array_equal(array.numpy(), 3 + 2 * i)


def test_the_kernel_is_loaded_once_before_anything_runs(libraries: StandIns) -> None:
    """Whatever is packed later, and by which process set: to load it then could wait for a rank that waits for this."""
    with GpuWorld(libraries, 2) as world:
        before = libraries.count("modules")
        sets = [0, world.add_set(1, 0, 1)]
        arrays = [member.array(np.ones(4, np.float32)) for member in world.members]
        handles = []
        for count, (member, array) in enumerate(zip(world.members, arrays, strict=True), 1):
            handles.append(member.start(ALLREDUCE, "allreduce.x", [array], [array], reduce_op=SUM))
            assert libraries.count("modules") == before + count
        for member, handle in zip(world.members, handles, strict=True):
            member.finish(handle)
        for number in sets:
            world.run(lambda m, n=number: group(m, f"allreduce.{n}", process_set=n))
        assert libraries.count("modules") == before + 2


def test_one_kernel_packs_and_one_unpacks(pair: GpuWorld, libraries: StandIns) -> None:
    before = [libraries.count(what) for what in ("launches", "copies", "modules")]
    for arrays in pair.run(lambda m: group(m, "allreduce.x")):
        check(arrays)
    after = [libraries.count(what) for what in ("launches", "copies", "modules")]
    assert [a - b for a, b in zip(after, before, strict=True)] == [2 * 2, 0, 2]


@pytest.mark.parametrize("failing", [[], ["cuModuleLoadData"], ["cuModuleLoadData", "missing"]])
def test_ranks_without_the_kernel_make_the_same_calls(libraries: StandIns, failing: list[str]) -> None:
    """On none of the ranks, on one, or on all: NCCL's stand-in compares what the ranks call."""
    files = {"nvrtc_file": "/nowhere/libnvrtc.so.12"} if "missing" in failing else {}
    with GpuWorld(libraries, 2, more_files=files, **WAYS["kernel"]) as world:
        if failing == ["cuModuleLoadData"]:
            libraries.fail("cuModuleLoadData", 209)
        for step in range(3):
            for arrays in world.run(lambda m, step=step: group(m, f"allreduce.{step}")):
                check(arrays)
        assert eventually(lambda: len(world.negotiator.notes) == len(failing))
        for _, worth_saying, sentence in world.negotiator.notes:
            assert worth_saying
            assert ("/nowhere/libnvrtc.so.12" if files else "cuModuleLoadData") in sentence


def test_the_buffer_is_not_used_again_too_early(pair: GpuWorld) -> None:
    """Rank 1's tensors are not ready yet, while batches of growing size are queued, which share its buffer."""
    held = pair.gpus[1].hold()
    sizes = (10, 3000, 20_000, 100)
    groups = [pair.run(lambda m, n=n: group(m, f"allreduce.{n}", elements=n)) for n in sizes]
    pair.gpus[1].release(held)
    for ranks in groups:
        for arrays in ranks:
            check(arrays)


@pytest.mark.parametrize("function", ["cuLaunchKernel", "cuMemcpyDtoDAsync_v2", "cuMemAllocFromPoolAsync"])
def test_a_failure_to_pack_ends_the_epoch_everywhere(libraries: StandIns, function: str) -> None:
    with GpuWorld(libraries, 2, batched_copies=int(function == "cuLaunchKernel")) as world:
        arrays = world.run(lambda m: [m.array(np.ones(50, np.float32)) for _ in range(20)])
        libraries.fail(function, 2)

        def steps(member: GpuMember) -> None:
            mine = arrays[member.rank]
            for step in range(100):
                member.finish(member.start(ALLREDUCE, f"allreduce.{step}", mine, list(mine), reduce_op=SUM))
                member.engine.submit(OpSpec(BARRIER), "barrier.noname", []).result()

        def body(member: GpuMember) -> str:
            with pytest.raises(RuntimeError) as raised:
                steps(member)
            return str(raised.value)

        said = "There is no buffer in which small tensors are packed" if "Alloc" in function else f"{function} failed"
        for error in world.run(body):
            assert said in error
        for member in world.members:
            member.gpu.synchronize()


def test_after_an_abort_nothing_is_written_any_more(pair: GpuWorld, libraries: StandIns) -> None:
    """Rank 0 waits in NCCL for rank 1; the end comes, and with it what follows on rank 0's stream."""
    pair.run(lambda m: group(m, "allreduce.good"))
    held = pair.gpus[1].hold()
    arrays = pair.run(lambda m: group(m, "allreduce.never"))
    pair.engines[1].abort("rank 1 on host here gave up.")

    assert eventually(lambda: ended(pair.engines[0]) is not None)
    pair.engines[0].close()
    for array in arrays[0]:
        size = ctypes.c_size_t(array.shape[0] * array.dtype.itemsize)
        with array.gpu:
            address = ctypes.c_uint64(array.address)
            libraries.check(libraries.cuda.cuMemsetD8Async(address, ctypes.c_ubyte(7), size, ctypes.c_void_p(0)))
    pair.gpus[0].synchronize()
    pair.gpus[1].release(held)
    pair.gpus[1].synchronize()
    for array in arrays[0]:
        assert set(array.numpy().tobytes()) == {7}


def test_twenty_worlds_leave_nothing(libraries: StandIns) -> None:
    """Half of them end badly, with packed tensors on the devices that a peer never joins."""

    def cycle(badly: bool) -> None:
        with GpuWorld(libraries, 2, **WAYS["kernel"]) as world:
            world.run(lambda m: group(m, "allreduce.good"))
            if badly:
                held = world.gpus[1].hold()
                arrays = world.run(lambda m: group(m, "allreduce.never", elements=3000))
                world.engines[1].abort("rank 1 on host here gave up.")
                world.gpus[0].synchronize()
                world.gpus[1].release(held)
                del arrays

    libraries.check_nothing_is_left(cycle)
