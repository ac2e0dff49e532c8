"""A tensor that gets other memory while an operation on it is in flight: the engine goes on with what it was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_codes import ends_with
from worlds import World

from horovod.base.errors import OperationCode

ROWS = 10 << 20  # of float32: more than malloc ever keeps, so that what is given back is gone at once

STARTED: dict[str, Callable[[Any, torch.Tensor, str], Any]] = {
    "allreduce_": lambda hvd, x, name: hvd.allreduce_async_(x, op=hvd.Sum, name=name),
    "allreduce": lambda hvd, x, name: hvd.allreduce_async(x, op=hvd.Sum, name=name),
    "grouped_allreduce_": lambda hvd, x, name: hvd.grouped_allreduce_async_([x], op=hvd.Sum, name=name),
    "grouped_allreduce": lambda hvd, x, name: hvd.grouped_allreduce_async([x], op=hvd.Sum, name=name),
    "allgather": lambda hvd, x, name: hvd.allgather_async(x, name=name),
    "grouped_allgather": lambda hvd, x, name: hvd.grouped_allgather_async([x], name=name),
    "broadcast_": lambda hvd, x, name: hvd.broadcast_async_(x, 0, name=name),
    "alltoall": lambda hvd, x, name: hvd.alltoall_async(x, name=name),
    "reducescatter": lambda hvd, x, name: hvd.reducescatter_async(x, op=hvd.Sum, name=name),
    "grouped_reducescatter": lambda hvd, x, name: hvd.grouped_reducescatter_async([x], op=hvd.Sum, name=name),
}


def _with_other_memory(case: str, how: str) -> None:
    import horovod.torch as hvd

    def start() -> Any:
        return STARTED[case](hvd, tensor, f"{how}.{case}")

    tensor = torch.full((ROWS,), 1.0 + hvd.rank())
    if hvd.rank() == 0:
        handle = start()
        if how == "data":
            tensor.data = torch.zeros(1)
        else:
            tensor.set_(torch.zeros(1))
        assert tensor.tolist() == [0]
    hvd.broadcast_object("its memory is gone", 0)
    if hvd.rank() == 1:
        handle = start()
    result = hvd.synchronize(handle)
    if case == "alltoall":
        result = result[0]
    result = result[0] if case.startswith("grouped") else result
    if result is tensor and hvd.rank() == 0:
        assert result.tolist() == [0]  # it has other memory
        return
    kind = case.removeprefix("grouped_")
    expected = (1, 2) if kind in ("allgather", "alltoall") else (1, 1) if kind == "broadcast_" else (3, 3)
    half = result.numel() // 2
    assert (result[:half].unique().item(), result[half:].unique().item()) == expected


@pytest.mark.parametrize("case", STARTED)
def test_a_tensor_that_gets_other_memory(pair: World, case: str) -> None:
    pair.run(_with_other_memory, case, "data")


def test_a_tensor_that_is_set_to_other_memory(pair: World) -> None:
    pair.run(_with_other_memory, "allreduce_", "set")


# What frees or moves a storage is not hindered by references to it.
MOVED: dict[str, Callable[[torch.Tensor], Any]] = {
    "resized": lambda x: x.resize_(5000),
    "storage resized": lambda x: x.untyped_storage().resize_(0),
    "shared": lambda x: x.share_memory_(),
}


def _with_moved_memory(case: str) -> None:
    import horovod.torch as hvd

    # Only read by the engine, and so small that malloc does not give it back to the system.
    tensor = torch.ones(1000)
    if hvd.rank() == 0:
        handles = [hvd.allreduce_async(tensor, name=case), hvd.grouped_allgather_async([tensor, tensor], name=case)]
        MOVED[case](tensor)
    hvd.broadcast_object("its memory is gone", 0)
    if hvd.rank() == 1:
        handles = [hvd.allreduce_async(tensor, name=case), hvd.grouped_allgather_async([tensor, tensor], name=case)]
        for handle in handles:
            hvd.synchronize(handle)
        return
    with pytest.raises(ValueError, match=ends_with(OperationCode.MOVED_TENSOR, f"allreduce.{case}", "clone()")):
        hvd.synchronize(handles[0])
    with pytest.raises(ValueError, match=ends_with(OperationCode.MOVED_TENSOR, f"grouped_allgather.{case}")):
        hvd.synchronize(handles[1])
    assert hvd.synchronize(handles[0]) is None


@pytest.mark.parametrize("case", MOVED)
def test_memory_that_is_given_back_in_flight_is_an_error(pair: World, case: str) -> None:
    pair.run(_with_moved_memory, case)


def _resized_in_place() -> None:
    import horovod.torch as hvd

    tensor = torch.ones(8)
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="smaller")
    view = tensor.resize_(2, 2)  # its memory stays where it is
    hvd.synchronize(handle)
    assert view.tolist() == [[2, 2], [2, 2]]


def test_a_smaller_shape_is_none(pair: World) -> None:
    pair.run(_resized_in_place)
