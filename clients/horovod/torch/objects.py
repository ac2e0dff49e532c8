"""Python objects over the wire, as cloudpickle in uint8 tensors. Only what authenticated peers sent is unpickled."""

from __future__ import annotations

import struct
from typing import Any, Final, TypeVar

import cloudpickle
import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.ops.allgather import allgather
from horovod.torch.ops.broadcast import broadcast_, check_root
from horovod.worker.runtime.context import current

T = TypeVar("T")

_LENGTH: Final = struct.Struct("<Q")
# The first broadcast has this size on every call, so it is negotiated once, and small objects need no second one.
_HEAD_BYTES: Final = 1024


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """The object that rank `root_rank` passed, on every rank. The root gets its own object back, unchanged.

    The others pass anything (usually None). The object is pickled with cloudpickle.

    Args:
        obj: on the root, what to send.
        root_rank: a global rank.
        name: matches the call across ranks; the default is the same for all objects.
        process_set: the ranks that take part.
    """
    check_root(root_rank, process_set)
    name = name or "broadcast_object"
    is_root = current().world.rank == root_rank
    payload = memoryview(cloudpickle.dumps(obj)) if is_root else memoryview(b"")
    head = bytearray(_HEAD_BYTES)
    if is_root:
        _LENGTH.pack_into(head, 0, len(payload))
        inside = payload[: _HEAD_BYTES - _LENGTH.size]
        head[_LENGTH.size : _LENGTH.size + len(inside)] = inside
    broadcast_(torch.frombuffer(head, dtype=torch.uint8), root_rank, f"{name}.sz", process_set)
    (length,) = _LENGTH.unpack_from(head)
    if length <= _HEAD_BYTES - _LENGTH.size:
        return obj if is_root else _loads(memoryview(head)[_LENGTH.size : _LENGTH.size + length])
    body = bytearray(_rounded(length))
    if is_root:
        body[:length] = payload
    broadcast_(torch.frombuffer(body, dtype=torch.uint8), root_rank, f"{name}.t", process_set)
    return obj if is_root else _loads(memoryview(body)[:length])


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """The objects of all ranks, ordered by rank. Objects may differ in type and size.

    Args:
        obj: this rank's object; pickled with cloudpickle.
        name: matches the call across ranks; the default is the same for all objects.
        process_set: the ranks that take part.
    """
    payload = cloudpickle.dumps(obj)
    own = bytearray(_LENGTH.pack(len(payload)) + payload)
    gathered = allgather(torch.frombuffer(own, dtype=torch.uint8), name or "allgather_object", process_set)
    everything = memoryview(gathered.numpy().data)
    objects = []
    while len(everything):
        (length,) = _LENGTH.unpack_from(everything)
        everything = everything[_LENGTH.size :]
        objects.append(_loads(everything[:length]))
        everything = everything[length:]
    return objects


def _rounded(length: int) -> int:
    """`length` rounded up by at most an eighth: sizes that repeat are agreed on already."""
    step = max(64, 1 << (length.bit_length() - 4))
    return -(-length // step) * step


def _loads(payload: memoryview) -> Any:
    return cloudpickle.loads(payload)
