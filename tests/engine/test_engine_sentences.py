"""The sentences of the engine's errors, whole, with their codes. Other tests name the code and the facts."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from world import (
    ADASUM,
    ALLREDUCE_SUM,
    AVERAGE,
    BARRIER,
    DTYPES,
    MAX,
    EngineWorld,
    Member,
)

from horovod import _core

DRIVER = "/nowhere/libcuda.so.1"
NO_FILE = "cannot open shared object file: No such file or directory"
NO_DRIVER = (
    f"There is no NVIDIA driver on this host: its library can't be loaded ({DRIVER}: {NO_FILE}). Install the driver, "
    "name its libcuda.so.1 in HOROVOD_CUDA_LIBRARY where it is in an unusual place, or move the tensors to the CPU. "
    "[no-gpu]"
)


@pytest.fixture(scope="module")
def member() -> Iterator[Member]:
    """Rank 1 of a world of two, where it is alone in the process set 3, and rank 0 in 5."""
    with EngineWorld(2, files={"cuda_file": DRIVER}) as world:
        world.add_set(3, 1)
        world.add_set(5, 0)
        yield world.members[1]


def ones(count: int = 4, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(count, dtype)


def scalar() -> np.ndarray:
    return np.array(1.0, np.float32)


class Tensor:
    """Of a framework that has no faster way to say where it is."""

    def __init__(self, array: np.ndarray) -> None:
        self.described = (array.ctypes.data, array.ctypes.data, DTYPES["float32"], array.shape)


def twice(member: Member) -> None:
    member.allreduce_async(ones(), "allreduce.twice")
    member.allreduce_async(ones(), "allreduce.twice")


def done_of_a_handle_that_was_synchronized(member: Member) -> None:
    handle = member.engine.submit(_core.OpSpec(BARRIER, process_set=3), "barrier.x", [])
    handle.result()
    handle.done()


def into_a_tensor_of_another_size(member: Member) -> None:
    reader = _core.TensorReader((Tensor,), lambda tensor: tensor.described)
    member.engine.submit(ALLREDUCE_SUM, "allreduce.x", [(Tensor(ones(2)), Tensor(ones(3)))], reader=reader)


def of_tensors(*tensors: tuple[Any, ...]) -> Callable[[Member], Any]:
    return lambda member: member.engine.submit(ALLREDUCE_SUM, "allreduce.x", tensors)


def with_set(number: int, *ranks: int) -> Callable[[Member], Any]:
    return lambda member: member.engine.add_process_set(number, ranks)


def alone(**options: int) -> Callable[[Member], Any]:
    return lambda member: _core.Engine(rank=0, size=1, epoch=1, labels=["rank 0"], options=options)


REFUSED: dict[str, Callable[[Member], Any]] = {
    "Requested to submit allreduce.twice on rank 1, a tensor with the same name as another tensor that is currently "
    "being processed. Give each operation in flight a name of its own, or synchronize the earlier one first. "
    "[name-in-flight]": twice,
    "An operation needs a name of 1 to 4096 characters, but this one has 0. [invalid-operation]": (
        lambda member: member.allreduce(ones(), "", process_set=3)
    ),
    "The name of an operation must be a str. [invalid-operation]": (
        lambda member: member.engine.submit(ALLREDUCE_SUM, 99, [])
    ),
    "The handle was not created or has been cleared: it was synchronized before. [cleared-handle]": (
        done_of_a_handle_that_was_synchronized
    ),
    # -- roots and process sets
    "broadcast.x: root rank 2 is not in the world, whose ranks are 0 to 1. [invalid-root]": (
        lambda member: member.broadcast(ones(), 2, "broadcast.x")
    ),
    "broadcast.x: root rank 0 is not a member of the provided process set (ranks [1]). [invalid-root]": (
        lambda member: member.broadcast(ones(), 0, "broadcast.x", process_set=3)
    ),
    "allreduce.x: process set 7 is not registered. [no-such-process-set]": (
        lambda member: member.allreduce(ones(), "allreduce.x", process_set=7)
    ),
    "allreduce.x: Rank 1 is not a member of the provided process set (ranks [0]). [not-in-process-set]": (
        lambda member: member.allreduce(ones(), "allreduce.x", process_set=5)
    ),
    "Process set 4 has rank 4, but the ranks of the world are 0 to 1. [internal]": with_set(4, 0, 4),
    "Process set 4 has ranks that are not in ascending order. [internal]": with_set(4, 1, 0),
    "Process set 4 has no ranks. [internal]": with_set(4),
    "Process set 0 needs a number above 0. [internal]": with_set(0, 1),
    "Process set 3 is registered already. [internal]": with_set(3, 1),
    "There is neither shared memory nor a connection to rank 0 (thread 0) on host here. [internal]": with_set(4, 0, 1),
    # -- reductions and tensors
    "allreduce.x: Average of bool is not defined. Use Max (any rank true) or Min (all ranks true), or convert the "
    "tensor to a numeric type first. [undefined-reduction]": (
        lambda member: member.allreduce(ones(2, bool), "allreduce.x", AVERAGE)
    ),
    "allreduce.x: Adasum of int32 is not defined. It needs float16, bfloat16, float32 or float64. "
    "[undefined-reduction]": lambda member: member.allreduce(ones(2, np.int32), "allreduce.x", ADASUM),
    "reducescatter.x: reducescatter supports Sum and Average only. [undefined-reduction]": (
        lambda member: member.reducescatter(ones(), MAX, "reducescatter.x")
    ),
    "reducescatter.x: reducescatter needs a tensor of at least one dimension, not a scalar. [no-rows]": (
        lambda member: member.reducescatter(scalar(), name="reducescatter.x")
    ),
    "Rank 1 tried to ALLGATHER a rank-zero tensor, in allgather.x. The tensor needs at least one dimension; use for "
    "example tensor.reshape(1). [no-rows]": (lambda member: member.allgather(scalar(), "allgather.x", process_set=3)),
    "allreduce.x: there is no tensor. [invalid-operation]": of_tensors(),
    "allreduce.x: a tensor has no memory. [wrong-tensor]": of_tensors((0, 0, DTYPES["float32"], (4,))),
    "The tensor for the result must be of the dtype, size and device of the input. [wrong-tensor]": (
        into_a_tensor_of_another_size
    ),
    "The tensors of one operation must be on one device and one stream. [wrong-tensor]": (
        of_tensors((1, 1, DTYPES["float32"], (1,)), (1, 1, DTYPES["float32"], (1,), 0, 0))
    ),
    f"allreduce.x: {NO_DRIVER}": of_tensors((1, 1, DTYPES["float32"], (1,), 0, 0)),
    # -- splits
    "alltoall.x: splits has 3 entries for 2 ranks. [wrong-splits]": (
        lambda member: member.alltoall(ones(), [1, 1, 1], "alltoall.x")
    ),
    "alltoall.x: the sum of splits (5) is greater than the first dimension (4). [wrong-splits]": (
        lambda member: member.alltoall(ones(), [4, 1], "alltoall.x")
    ),
    "alltoall.x: splits must not be negative. [wrong-splits]": (
        lambda member: member.alltoall(ones(), [-1, 1], "alltoall.x")
    ),
    "alltoall.x: the first dimension (3) must be a multiple of the number of ranks (2) when no splits are given. "
    "[wrong-splits]": lambda member: member.alltoall(ones(3), None, "alltoall.x"),
    # -- the engine itself
    "Rank 2 is not in a world of 2. [internal]": (
        lambda member: _core.Engine(rank=2, size=2, epoch=1, labels=["rank 0", "rank 1"])
    ),
    "Unknown engine option 'colour'. [internal]": alone(colour=1),
    "staging_bytes must be between 16 KiB and 256 MiB. [invalid-setting]": alone(staging_bytes=1),
    "The timeline file /no/such/folder/t.json can't be written: No such file or directory. [timeline]": (
        lambda member: member.engine.start_timeline("/no/such/folder/t.json", False, 0)
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_call_that_is_refused(member: Member, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=rf"\A{re.escape(sentence)}\Z"):
        REFUSED[sentence](member)


# -- the end of an epoch -----------------------------------------------------------------------------------------------
FAREWELL = (
    "Rank 0 (thread 0) on host here has shut down (it called hvd.shutdown() or its script ended), so operations that "
    "wait for it can't complete. (Rank 1 was running allreduce.x.) [shut-down]"
)


@pytest.mark.parametrize("transport", ["in_process", "tcp"])
@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        (lambda engine: engine.close(), FAREWELL),
        (lambda engine: engine.close("Why. [peer-lost]"), "Why. (Rank 1 was running allreduce.x.) [peer-lost]"),
        (lambda engine: engine.close("Rank 0 left."), "Rank 0 left. (Rank 1 was running allreduce.x.) [shut-down]"),
        (lambda engine: engine.abort("Why. [peer-lost]"), "Why. (Rank 1 was running allreduce.x.) [peer-lost]"),
    ],
    ids=["shut down", "with a code", "without a code", "aborted"],
)
def test_the_end_of_a_peer(transport: str, end: Callable[[Any], Any], sentence: str) -> None:
    with EngineWorld(2, transport) as world:
        waiting = world.members[1].allreduce_async(ones(), "allreduce.x")
        end(world.engines[0])
        with pytest.raises(RuntimeError, match=rf"\A{re.escape(sentence)}\Z"):
            waiting.result()


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        (1, "Horovod has been shut down. [shut-down]"),
        (
            2,
            (
                "Horovod has been shut down. The operation was not finished by all ranks before. (Rank 0 was running "
                "allreduce.x.) [shut-down]"
            ),
        ),
    ],
)
def test_after_its_own_end(size: int, sentence: str) -> None:
    with EngineWorld(size) as world:
        world.engines[0].close()
        with pytest.raises(RuntimeError, match=rf"\A{re.escape(sentence)}\Z"):
            world.members[0].allreduce(ones(), "allreduce.x")


def test_a_cause_that_is_long_keeps_its_code() -> None:
    """There is a bounded place for it in shared memory."""
    with EngineWorld(2) as world:
        waiting = world.members[1].allreduce_async(ones(), "allreduce.x")
        world.engines[0].abort("y" * 5000 + " [peer-lost]")
        with pytest.raises(RuntimeError, match=r"\Ay{2035} \(Rank 1 was running allreduce\.x\.\) \[peer-lost\]\Z"):
            waiting.result()


@pytest.mark.parametrize("transport", ["in_process", "tcp"])
def test_a_process_set_that_was_removed(transport: str) -> None:
    sentences = [
        (
            "The process set of ranks [0, 1] has been removed. The operation was not finished by all ranks before. "
            "[no-such-process-set]"
        ),
        (
            "Rank 0 (thread 0) on host here has removed the process set of ranks [0, 1], so operations in it can't "
            "complete. (Rank 1 was running allreduce.1.) [no-such-process-set]"
        ),
    ]
    with EngineWorld(2, transport) as world:
        world.add_set(1, 0, 1)
        waiting = [one.allreduce_async(ones(), f"allreduce.{one.rank}", process_set=1) for one in world.members]
        world.engines[0].remove_process_set(1)
        for handle, sentence in zip(waiting, sentences, strict=True):
            with pytest.raises(RuntimeError, match=rf"\A{re.escape(sentence)}\Z"):
                handle.result()


def test_an_operation_of_a_rank_that_has_joined() -> None:
    with EngineWorld(2) as world:

        def join() -> None:
            with pytest.raises(RuntimeError):
                world.engines[0].join()

        joining = threading.Thread(target=join)
        joining.start()
        assert world.negotiator.joined.wait(60)
        sentence = (
            "Requested to submit allreduce.x on rank 0, which has called hvd.join(); it takes part in nothing of its "
            "own in the global process set until hvd.join() has returned. [not-with-join]"
        )
        with pytest.raises(RuntimeError, match=rf"\A{re.escape(sentence)}\Z"):
            world.members[0].allreduce(ones(), "allreduce.x")
        world.engines[0].close()
        joining.join(60)


# -- what can't be had -------------------------------------------------------------------------------------------------
def test_segments_of_processes_that_are_gone() -> None:
    own = _core.Segment()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    for address, sentence in {
        "elsewhere": "'elsewhere' is not the address of a shared segment.",
        f"memfd:{child}:3:{1:016x}": (
            f"Could not open the shared segment of a local peer at /proc/{child}/fd/3 (its process may have ended; "
            "processes that share memory must run as one user in one pid namespace, otherwise set "
            "HOROVOD_TRANSPORT=tcp): No such file or directory."
        ),
    }.items():
        paths = {"segment": own, "segment_addresses": [own.address, address]}
        with pytest.raises(RuntimeError, match=rf"\ARank 1: {re.escape(sentence)} \[shared-memory\]\Z"):
            _core.Engine(rank=0, size=2, epoch=1, labels=["rank 0", "rank 1"], **paths)


def test_libraries_that_are_not_there() -> None:
    assert _core.cuda_obstacle(DRIVER) == NO_DRIVER
    assert _core.nccl_version("/nowhere/libnccl.so.2")[1] == (
        f"There is no NCCL on this host: it can't be loaded (/nowhere/libnccl.so.2: {NO_FILE}). PyTorch with CUDA "
        "brings it (the package nvidia-nccl-cu12 or newer), or install libnccl2; name the file in "
        "HOROVOD_NCCL_LIBRARY where it is in an unusual place. [no-nccl]"
    )
    assert _core.copy_kernel("/nowhere/libnvrtc.so", 80)[1] == (
        f"NVIDIA's run-time compiler can't be loaded (/nowhere/libnvrtc.so: {NO_FILE}). PyTorch with CUDA brings it "
        "(the package nvidia-cuda-nvrtc-cu12, or nvidia-cuda-nvrtc for CUDA 13); name its libnvrtc.so in "
        "HOROVOD_NVRTC_LIBRARY where it is in an unusual place. [missing-library]"
    )
