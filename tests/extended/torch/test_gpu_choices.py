"""HOROVOD_GPU_OPERATIONS and the settings for one operation each: which way tensors on GPUs really take."""

from __future__ import annotations

import pytest
from event_words import NO_NCCL
from gpu_worlds import standin_world

OPERATIONS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
NOWHERE = "/nowhere/libnccl.so.2"


def ways() -> dict[str, str]:
    """By operation: by what its tensors went, or the error."""
    import fake_gpu
    import torch

    import horovod.torch as hvd

    found = {}
    for operation in OPERATIONS:
        tensor = fake_gpu.on_gpu(torch.ones(2 * hvd.size()))
        calls = fake_gpu.count("groups")
        options = {"root_rank": 0} if operation == "broadcast" else {}
        try:
            result = getattr(hvd, operation)(tensor, name=operation, **options)
        except ValueError as error:
            found[operation] = str(error)
            continue
        assert float(result.cpu().sum()) in (2.0, 4.0, 8.0)
        found[operation] = "nccl" if fake_gpu.count("groups") > calls else "host"
    return found


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {}),
        ({"OPERATIONS": "NCCL"}, {}),
        ({"OPERATIONS": "host"}, dict.fromkeys(OPERATIONS, "host")),
        ({"OPERATIONS": "MPI"}, dict.fromkeys(OPERATIONS, "host")),
        ({"OPERATIONS": "gloo", "ALLTOALL": "nccl"}, dict.fromkeys(OPERATIONS, "host") | {"alltoall": "nccl"}),
        *(({operation.upper(): "host"}, {operation: "host"}) for operation in OPERATIONS),
    ],
    ids=lambda value: ",".join(f"{name}={way}" for name, way in value.items()) or "none",
)
def test_each_operation_goes_as_it_was_told(given: dict[str, str], wanted: dict[str, str]) -> None:
    environment = {f"HOROVOD_GPU_{name}": way for name, way in given.items()}
    with standin_world(2, **environment) as keeper:
        for found in keeper.get().run(ways):
            assert found == dict.fromkeys(OPERATIONS, "nccl") | wanted


@pytest.mark.parametrize("operation", OPERATIONS)
def test_without_nccl_what_demands_it_is_refused(operation: str) -> None:
    environment = {f"HOROVOD_GPU_{operation.upper()}": "nccl", "HOROVOD_NCCL_LIBRARY": NOWHERE}
    with standin_world(2, **environment) as keeper:
        for found in keeper.get().run(ways):
            sentence = found.pop(operation)
            assert f"HOROVOD_GPU_{operation.upper()} demands NCCL. {NO_NCCL}: " in sentence
            assert f"{operation}.{operation}: " in sentence
            assert NOWHERE in sentence
            assert set(found.values()) == {"host"}


def averages_of_integers() -> bool:
    """Whether they went by NCCL, which adds up in the tensor's type."""
    import fake_gpu
    import torch

    import horovod.torch as hvd

    calls = fake_gpu.count("groups")
    for dtype in (torch.int8, torch.int64):
        most = torch.iinfo(dtype).max
        tensor = fake_gpu.on_gpu(torch.full((2,), most, dtype=dtype))
        assert hvd.allreduce(tensor).cpu().tolist() == [most, most]
        assert hvd.reducescatter(tensor).cpu().tolist() == [most]
    return bool(fake_gpu.count("groups") > calls)


@pytest.mark.parametrize("operations", ["auto", "nccl"])
def test_averages_of_integers_go_through_the_host(operations: str) -> None:
    """A demand for NCCL is one that there is NCCL, not that it can do everything."""
    with standin_world(2, HOROVOD_GPU_OPERATIONS=operations) as keeper:
        assert keeper.get().run(averages_of_integers) == [False, False]


def what_is_built() -> tuple[bool, int]:
    import horovod.torch as hvd

    return hvd.cuda_built(), hvd.nccl_built()


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, (True, 22703)),
        ({"STANDIN_NCCL_VERSION": "21903"}, (True, 21903)),
        ({"STANDIN_NCCL_VERSION": "21304"}, (True, 0)),
        ({"HOROVOD_NCCL_LIBRARY": NOWHERE}, (True, 0)),
    ],
    ids=["both", "older", "too-old", "no-nccl"],
)
def test_what_is_built_in_a_world(environment: dict[str, str], wanted: tuple[bool, int]) -> None:
    """Outside of one, and without a driver: tests/engine/test_gpu_libraries.py."""
    with standin_world(1, **environment) as keeper:
        assert keeper.get().run(what_is_built) == [wanted]
