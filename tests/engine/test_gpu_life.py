"""What is particular to tensors on a device: when they are ready, who waits, how long they live, and how it fails."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from error_codes import ends_with
from exchange import CUDA, Tensor
from gpu_world import DeviceArray, GpuMember, GpuWorld, StandIns, ended, expect_error, now, ones, start
from resources import eventually
from world import (
    ALLGATHER,
    ALLREDUCE,
    ALLREDUCE_SUM,
    ALLTOALL,
    AVERAGE,
    BARRIER,
    BROADCAST,
    REDUCESCATTER,
    SUM,
    EngineWorld,
)

from horovod._core import OpSpec, TensorReader
from horovod.base.errors import EngineCode, OperationCode, code_of


# -- readiness and completion ------------------------------------------------------------------------------------------
def test_the_host_never_waits_for_a_device(pair: GpuWorld) -> None:
    """Rank 1's stream stands still, so nothing can be ready; all calls return all the same."""
    held = pair.gpus[1].hold()

    def body(member: GpuMember) -> DeviceArray:
        array = ones(member)
        for step in range(3):
            member.finish(start(member, array, f"allreduce.{step}"))
        return array

    arrays = pair.run(body)
    assert not (now(arrays[0]) == 8).any()
    pair.gpus[1].release(held)
    for array in arrays:
        np.testing.assert_array_equal(array.numpy(), 8.0)


def test_an_operation_waits_for_what_was_queued_before_it_was_submitted(pair: GpuWorld) -> None:
    """On a stream of the framework's own choice, which the engine knows of from the submission."""

    def body(member: GpuMember) -> None:
        member.current_stream = member.gpu.stream()
        held = member.gpu.hold(member.current_stream)
        array = member.array(np.full(1000, member.rank + 1, np.float32))  # is copied when the stream goes on
        handle = start(member, array)
        member.finish(handle)
        member.gpu.release(held)
        np.testing.assert_array_equal(array.numpy(), 3.0)

    pair.run(body)


def test_the_stream_that_waits_is_the_one_that_is_current_then(pair: GpuWorld) -> None:
    held = pair.gpus[0].hold()

    def body(member: GpuMember) -> tuple[DeviceArray, int]:
        array = ones(member)
        handle = start(member, array)
        member.current_stream = member.gpu.stream()
        member.finish(handle)
        return array, member.current_stream

    (mine, stream), _ = pair.run(body)
    other = pair.gpus[0].stream()
    pair.gpus[0].synchronize(other)  # a stream that nobody waits on goes on
    pair.gpus[0].release(held)
    np.testing.assert_array_equal(mine.numpy(stream), 2.0)


def test_results_of_unknown_size_are_read_in_the_order_of_the_stream(pair: GpuWorld) -> None:
    held = pair.gpus[1].hold()

    def body(member: GpuMember) -> list[Any]:
        rows = member.array(np.full((member.rank + 1, 2), member.rank, np.int32))
        gathered = member.finish(member.start(ALLGATHER, "allgather.x", [rows], [None]))
        pair_of = member.array(np.arange(2, dtype=np.int32))
        exchanged = member.finish(member.start(ALLTOALL, "alltoall.x", [pair_of], [None]))
        part = member.finish(member.start(REDUCESCATTER, "reducescatter.x", [pair_of], [None], reduce_op=SUM))
        assert exchanged[1] == [1, 1]
        assert gathered[0].shape == (3, 2)
        return [gathered[0], exchanged[0][0], part[0]]

    for rank, (gathered, exchanged, part) in enumerate((pair.run(body), pair.gpus[1].release(held))[0]):
        np.testing.assert_array_equal(gathered.numpy()[:, 0], [0, 1, 1])
        np.testing.assert_array_equal(exchanged.numpy(), [rank, rank])
        np.testing.assert_array_equal(part.numpy(), [2 * rank])


def test_the_option_by_which_the_host_waits(libraries: StandIns) -> None:
    with GpuWorld(libraries, 2, async_completion=0) as world:
        held = world.gpus[1].hold()
        arrays = [ones(member) for member in world.members]
        handles = [start(member, array) for member, array in zip(world.members, arrays, strict=True)]
        done = threading.Event()

        def wait() -> None:
            world.members[0].finish(handles[0])
            done.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        assert eventually(lambda: world.engines[0].counters()["batches"] == 1)
        assert not handles[0].done()
        assert not done.is_set()
        world.gpus[1].release(held)
        assert done.wait(60)
        np.testing.assert_array_equal(now(arrays[0]), 2.0)
        assert eventually(handles[1].done)
        waiter.join()
        world.members[1].finish(handles[1])


# -- lifetime ----------------------------------------------------------------------------------------------------------
class Kept:
    """Stands for a framework's tensors."""


@pytest.mark.parametrize("ending", ["wait_on_another_stream", "wait", "abandon", "run"])
def test_tensors_are_kept_until_nothing_can_come_before_the_device(pair: GpuWorld, ending: str) -> None:
    """A framework that gets them back gives their memory to others in the order of the stream that they were used on:
    where this one waits for the operation they are free at once, otherwise when the device has passed it."""
    held = pair.gpus[1].hold()
    streams = [gpu.stream() for gpu in pair.gpus]

    def body(member: GpuMember) -> tuple[weakref.ref[Kept], DeviceArray]:
        kept, array = Kept(), ones(member)
        tensor = [(array.address, array.address, 7, array.shape, member.rank, 0)]
        if ending == "run":
            member.engine.run(ALLREDUCE_SUM, "allreduce.x", tensor, keep=kept)
        else:
            handle = member.engine.submit(ALLREDUCE_SUM, "allreduce.x", tensor, keep=kept)
            if ending == "wait":
                handle.result()
            elif ending == "wait_on_another_stream":
                handle.result(streams[member.rank])
            else:
                del handle
        return weakref.ref(kept), array

    answers = pair.run(body)

    def submit_another(member: GpuMember) -> None:
        member.engine.submit(OpSpec(BARRIER), "barrier.noname", []).result()

    free_at_once = ending in ("wait", "run")
    assert all((kept() is None) == free_at_once for kept, _ in answers)
    pair.run(submit_another)
    gc.collect()
    assert all((kept() is None) == free_at_once for kept, _ in answers)
    pair.gpus[1].release(held)
    for (_, array), stream in zip(answers, streams, strict=True):
        if ending != "abandon":  # no stream of the framework's waits for what nobody asked for
            np.testing.assert_array_equal(array.numpy(0 if free_at_once else stream), 2.0)

    def gone() -> bool:
        pair.run(submit_another)
        return all(kept() is None for kept, _ in answers)

    assert eventually(gone)


def test_results_are_given_back(pair: GpuWorld, libraries: StandIns) -> None:
    def body(member: GpuMember) -> None:
        for _ in range(5):
            member.allgather(np.ones((3, 2), np.float32))

    pair.run(body)
    blocks = libraries.count("blocks")
    pair.run(body)
    gc.collect()
    assert eventually(lambda: libraries.count("blocks") <= blocks)


def test_twenty_worlds_leave_nothing(libraries: StandIns) -> None:
    """Half of them end badly, with work on the devices that a peer never joins."""

    def body(member: GpuMember) -> None:
        member.allreduce(np.ones(1000, np.float32), op=AVERAGE, prescale=0.5)
        member.allgather(np.ones((3, 2), np.float32))
        member.reducescatter(np.ones((3, 2), np.float32))

    def cycle(badly: bool) -> None:
        with GpuWorld(libraries, 2) as world:
            world.run(body)
            if not badly:
                return
            held = world.gpus[1].hold()
            arrays = [ones(member, 300_000) for member in world.members]
            handles = [start(m, a, "allreduce.never") for m, a in zip(world.members, arrays, strict=True)]
            world.members[0].finish(handles[0])
            world.engines[1].abort("rank 1 on host here gave up.")
            world.gpus[0].synchronize()  # comes to an end
            world.gpus[1].release(held)
            with pytest.raises(RuntimeError, match="gave up"):
                world.members[0].allreduce(np.ones(4, np.float32))

    libraries.check_nothing_is_left(cycle)


# -- refusals ----------------------------------------------------------------------------------------------------------
def test_what_is_not_defined_is_told_at_once(pair: GpuWorld) -> None:
    member = pair.members[0]
    array = member.array(np.ones(4, "bool"))
    with pytest.raises(ValueError, match=ends_with(OperationCode.UNDEFINED_REDUCTION, "allreduce.x", "bool")):
        member.start(ALLREDUCE, "allreduce.x", [array], [array], reduce_op=AVERAGE)
    pair.run(lambda m: m.allreduce(np.ones(4, np.float32)))  # the engine stays usable


def test_a_framework_s_tensors_are_read_with_its_current_stream(
    pair: GpuWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = TensorReader((Tensor,), lambda tensor: pytest.fail("it needs no description"))

    def body(member: GpuMember) -> None:
        array = ones(member)
        there = {"data": array.address, "device_type": CUDA, "device_id": array.gpu.ordinal}
        tensor = Tensor(np.ones(array.shape, np.float32), **there)
        handle = member.engine.submit(ALLREDUCE_SUM, "allreduce.x", (tensor,), keep=array, reader=reader)
        assert handle.device == array.gpu.ordinal
        handle.result()
        np.testing.assert_array_equal(array.numpy(), 2)

    streams = {member.gpu.ordinal: 0 for member in pair.members}
    monkeypatch.setattr(Tensor, "streams", streams)
    pair.run(body)


def test_a_rank_has_one_gpu(pair: GpuWorld) -> None:
    member = pair.members[0]
    array = ones(member)

    def submit(*devices: int) -> None:
        tensors = [(array.address, array.address, 7, array.shape, device, 0) for device in devices]
        member.engine.submit(ALLREDUCE_SUM, "allreduce.y", tensors)

    def submit_mixed() -> None:
        member.engine.submit(ALLREDUCE_SUM, "allreduce.y", [(1, 1, 7, (1,)), (1, 1, 7, (1,), 0, 0)])

    expect_error(lambda: submit(99), ValueError, ends_with(EngineCode.NO_GPU, "allreduce.y", "GPU 99", "8"))
    pair.run(lambda m: m.allreduce(np.ones(4, np.float32)))
    expect_error(lambda: submit(1), ValueError, ends_with(OperationCode.WRONG_GPU, "GPU 1", "rank 0", "GPU 0"))
    expect_error(lambda: submit(0, 1), ValueError, ends_with(OperationCode.WRONG_TENSOR))
    expect_error(submit_mixed, ValueError, ends_with(OperationCode.WRONG_TENSOR))


def test_without_a_driver_cpu_tensors_go_on(libraries: StandIns) -> None:
    files = {"cuda_file": "/nowhere/lib.so", "nccl_file": libraries.nccl_file}
    with EngineWorld(2, files=files) as world:
        array = np.ones(4, np.float32)
        tensor = [(array.ctypes.data, array.ctypes.data, 7, array.shape, 0, 0)]
        expect_error(
            lambda: world.engines[0].submit(ALLREDUCE_SUM, "allreduce.x", tensor),
            ValueError,
            ends_with(EngineCode.NO_GPU, "allreduce.x", "/nowhere/lib.so"),
        )
        world.run(lambda m: m.allreduce(np.ones(4, np.float32), "allreduce.x"))


def test_results_can_not_be_read_by_the_host(pair: GpuWorld) -> None:
    def body(member: GpuMember) -> None:
        handle = member.start(ALLGATHER, "allgather.x", [ones(member)], [None])
        [output] = handle.result()
        with pytest.raises(BufferError) as raised:
            memoryview(output)
        assert code_of(str(raised.value.__cause__)) is EngineCode.INTERNAL

    pair.run(body)


# -- failures ----------------------------------------------------------------------------------------------------------
def test_a_failure_to_start_nccl_names_the_rank_on_every_rank(pair: GpuWorld, libraries: StandIns) -> None:
    libraries.fail("ncclCommInitRankConfig", 1)

    def body(member: GpuMember) -> str:
        with pytest.raises(RuntimeError) as raised:
            member.allreduce(np.ones(4, np.float32))
        return str(raised.value)

    for error in pair.run(body):
        facts = ("on rank ", "ncclCommInitRankConfig", "unhandled cuda error (1)")
        assert re.search(ends_with(EngineCode.NCCL_FAILED, *facts), error)


@pytest.mark.parametrize("function", ["ncclAllReduce", "ncclGroupEnd", "cuStreamWaitEvent"])
def test_a_failure_while_queueing_ends_the_epoch_everywhere(pair: GpuWorld, libraries: StandIns, function: str) -> None:
    pair.run(lambda m: m.allreduce(np.ones(4, np.float32), "allreduce.good"))
    arrays = [ones(member) for member in pair.members]
    # That of rank 0's engine, before the other can have come to it: the operation runs when both have submitted.
    libraries.fail(function, 1)

    def steps(member: GpuMember) -> None:
        for step in range(100):
            member.finish(start(member, arrays[member.rank], f"allreduce.{step}"))
            member.engine.submit(OpSpec(BARRIER), "barrier.noname", []).result()

    def body(member: GpuMember) -> str:
        with pytest.raises(RuntimeError) as raised:
            steps(member)
        return str(raised.value)

    for error in pair.run(body):
        code = EngineCode.NCCL_FAILED if function.startswith("nccl") else EngineCode.GPU_FAILED
        assert re.search(ends_with(code, function), error)
    for member in pair.members:
        member.gpu.synchronize()  # nothing hangs there


@pytest.mark.parametrize("waiting", [False, True])
def test_an_asynchronous_error_is_noticed_though_nobody_asks(
    pair: GpuWorld, libraries: StandIns, waiting: bool
) -> None:
    """Or though all threads wait for something else."""
    pair.run(lambda m: m.allreduce(np.ones(4, np.float32), "allreduce.good"))
    array = np.ones(4, np.float32)
    tensor = (array.ctypes.data, array.ctypes.data, 7, (4,))
    errors: list[str] = []

    def wait(member: GpuMember) -> None:
        try:
            member.engine.run(ALLREDUCE_SUM, f"allreduce.of_rank_{member.rank}", [tensor], keep=array)
        except RuntimeError as error:
            errors.append(str(error))

    waiters = [threading.Thread(target=wait, args=(member,)) for member in pair.members if waiting]
    for waiter in waiters:
        waiter.start()
    held = pair.gpus[1].hold()
    arrays = pair.run(lambda m: [a := ones(m), m.finish(start(m, a))][0])
    libraries.fail("ncclCommGetAsyncError", 3)
    assert eventually(lambda: ended(pair.engines[0]) is not None and ended(pair.engines[1]) is not None)
    assert re.search(ends_with(EngineCode.NCCL_FAILED, "ncclCommGetAsyncError", "(3)"), ended(pair.engines[0]) or "")
    pair.gpus[0].synchronize()  # its kernel was ended
    pair.gpus[1].release(held)
    for waiter in waiters:
        waiter.join(60)
    assert len(errors) == len(waiters)
    assert all("ncclCommGetAsyncError" in error for error in errors)
    del arrays


def test_an_abort_frees_the_streams_and_tells_who_waits_then(pair: GpuWorld) -> None:
    held = pair.gpus[1].hold()
    arrays = [ones(member, 1000) for member in pair.members]
    handles = [start(member, array) for member, array in zip(pair.members, arrays, strict=True)]
    assert eventually(lambda: all(handle.done() for handle in handles))
    pair.engines[1].abort("rank 1 on host here gave up.")
    assert eventually(lambda: ended(pair.engines[0]) is not None)
    for member, handle in zip(pair.members, handles, strict=True):
        with pytest.raises(RuntimeError, match="rank 1 on host here gave up"):
            member.finish(handle)
    pair.gpus[0].synchronize()
    pair.gpus[1].release(held)
    pair.gpus[1].synchronize()
    expect_error(lambda: pair.members[0].allreduce(np.ones(4, np.float32)), RuntimeError, "gave up")


def test_a_device_that_does_not_go_on_ends_the_epoch(libraries: StandIns) -> None:
    """Rank 1's tensors never become ready, so rank 0 waits on its device for ever."""
    with GpuWorld(libraries, 2, progress_timeout_ms=1000) as world:
        world.run(lambda m: m.allreduce(np.ones(4, np.float32), "allreduce.good"))
        held = world.gpus[1].hold()
        arrays = world.run(lambda m: [a := ones(m), m.finish(start(m, a))][0])
        assert eventually(lambda: ended(world.engines[0]) is not None)
        error = ended(world.engines[0]) or ""
        facts = ("rank 0 (thread 0) on host here", "1000 ms", "allreduce.x")
        assert re.search(ends_with(OperationCode.NO_PROGRESS, *facts), error)
        world.gpus[0].synchronize()
        world.gpus[1].release(held)
        del arrays


@pytest.mark.parametrize("transport", ["in_process", "tcp", "hosts"])
def test_leaving_finishes_what_is_queued(libraries: StandIns, transport: str) -> None:
    with GpuWorld(libraries, 3, transport) as world:
        held = world.gpus[1].hold()
        arrays = world.run(lambda m: [a := ones(m), m.finish(start(m, a))][0])
        leaving = threading.Thread(target=world.engines[0].close)
        leaving.start()
        world.gpus[1].release(held)
        leaving.join(60)
        assert not leaving.is_alive()
        for array in arrays:
            np.testing.assert_array_equal(array.numpy(), 3.0)


def test_broadcast_keeps_the_roots_tensor(pair: GpuWorld) -> None:
    def body(member: GpuMember) -> None:
        source = member.array(np.full(6, member.rank, np.float64))
        target = member.array(np.zeros(6))
        member.finish(member.start(BROADCAST, "broadcast.apart", [source], [target], root=1))
        np.testing.assert_array_equal(target.numpy(), 1.0)
        np.testing.assert_array_equal(source.numpy(), member.rank)

    pair.run(body)
