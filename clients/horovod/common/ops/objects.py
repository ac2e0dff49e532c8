"""Python objects over the wire, as cloudpickle in bytes. Only what authenticated peers sent is unpickled.

The functions that frameworks export (TensorFlow's have an argument more).
"""

from __future__ import annotations

import ctypes
import io
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import cloudpickle

from horovod._core import DType
from horovod.base.errors import OperationCode, coded, without_code
from horovod.common import optimizer_numbers
from horovod.common.ops.collectives import ALLGATHER, BROADCAST, check_root
from horovod.common.ops.framework import Span
from horovod.common.ops.specs import set_number, spec
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.worker.runtime.context import current

T = TypeVar("T")

_LENGTH: Final = struct.Struct("<Q")
# The first broadcast has this size on every call, so it is negotiated once, and small objects need no second one.
_HEAD_BYTES: Final = 1024


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """The object that rank `root_rank` passed, on every rank. The root gets its own object back, unchanged.

    The others pass anything (usually None). The object is pickled with cloudpickle. Example, on ranks 0 and 1:

        >>> hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None, root_rank=0)
        {'epoch': 3}

    Args:
        obj: on the root, what to send.
        root_rank: a global rank.
        name: matches the call across ranks; the default is the same for all objects.
        process_set: the ranks that take part.

    Raises:
        ValueError: a root that is not a rank of the set, a bad process set, an object that root can't pickle.
        HorovodInternalError: a rank was lost.
        Exception: on the root, what pickling raises; the other ranks get ValueError with its text.
    """
    return broadcast_keeping(obj, root_rank, (), name, process_set)


def broadcast_keeping(
    obj: T,
    root_rank: int,
    kept: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """`broadcast_object`, but objects in `kept` do not travel: what refers to kept[i] on the root refers to kept[i] of
    the receiver there. As many on all ranks.
    """
    number = check_root(root_rank, process_set)
    name = name or "broadcast_object"
    is_root = current().world.rank == root_rank
    pickled, error = _pickled(obj, "broadcast_object", kept) if is_root else (b"", None)
    payload = memoryview(pickled)
    head = bytearray(_HEAD_BYTES)
    if is_root:
        _LENGTH.pack_into(head, 0, len(payload))
        inside = payload[: _HEAD_BYTES - _LENGTH.size]
        head[_LENGTH.size : _LENGTH.size + len(inside)] = inside
    _broadcast(head, root_rank, f"{name}.sz", number)
    (length,) = _LENGTH.unpack_from(head)
    if length <= _HEAD_BYTES - _LENGTH.size:
        received = memoryview(head)[_LENGTH.size : _LENGTH.size + length]
    else:
        body = bytearray(_rounded(length))
        if is_root:
            body[:length] = payload
        _broadcast(body, root_rank, f"{name}.t", number)
        received = memoryview(body)[:length]
    if error is not None:
        raise error
    if is_root:
        return obj
    with optimizer_numbers.of_root():
        return _loads(received, kept)  # type: ignore[no-any-return]


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """The objects of all ranks as a list, ordered by rank. Objects may differ in type and size.

        >>> hvd.allgather_object("x" * hvd.rank())
        ['', 'x']

    Args:
        obj: this rank's object; pickled with cloudpickle.
        name: matches the call across ranks; the default is the same for all objects.
        process_set: the ranks that take part.

    Raises:
        ValueError: a bad process set, or another rank's object can't be pickled; the message says which and why.
        HorovodInternalError: a rank was lost.
        Exception: pickling failed on this rank.
    """
    payload, error = _pickled(obj, "allgather_object")
    own = bytearray(_LENGTH.pack(len(payload)) + payload)
    gathered = _allgather(own, name or "allgather_object", set_number(process_set, "Allgather"))
    if error is not None:
        raise error
    everything = gathered
    objects = []
    while len(everything):
        (length,) = _LENGTH.unpack_from(everything)
        everything = everything[_LENGTH.size :]
        objects.append(_loads(everything[:length]))
        everything = everything[length:]
    return objects


def _span(buffer: bytearray, output: bool) -> Span:
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return address, address if output else 0, DType.UINT8, (len(buffer),)


def _broadcast(buffer: bytearray, root_rank: int, name: str, number: int) -> None:
    made = spec(BROADCAST, number, root_rank)
    current().engine.run(made, "broadcast." + name, (_span(buffer, True),), buffer)


def _allgather(buffer: bytearray, name: str, number: int) -> memoryview:
    outputs: Any = current().engine.run(spec(ALLGATHER, number), "allgather." + name, (_span(buffer, False),), buffer)
    return memoryview(outputs[0])


def _rounded(length: int) -> int:
    """`length` rounded up by at most an eighth: sizes that repeat are agreed on already."""
    step = max(64, 1 << (length.bit_length() - 4))
    return -(-length // step) * step


@dataclass(frozen=True)
class _Failed:
    """Travels in place of an object that its rank could not pickle, so that the others do not wait for it."""

    sentence: str


class _KeepingPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes the place in `kept` in place of an object that is there."""

    def __init__(self, file: io.BytesIO, kept: Sequence[Any]) -> None:
        super().__init__(file)
        self._places = {id(one): place for place, one in enumerate(kept)}

    def persistent_id(self, obj: Any) -> int | None:
        return self._places.get(id(obj))


class _KeepingUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kept: Sequence[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, place: int) -> Any:
        return self._kept[place]


def _pickled(obj: Any, function: str, kept: Sequence[Any] = ()) -> tuple[bytes, Exception | None]:
    """The bytes for the object, and the error if it could not be pickled."""
    try:
        if not kept:
            return cloudpickle.dumps(obj), None
        file = io.BytesIO()
        _KeepingPickler(file, kept).dump(obj)
        return file.getvalue(), None
    except Exception as error:  # any class: objects define how they are pickled
        world = current().world
        sentence = (
            f"{function}: rank {world.rank} can't pickle its object, a {type(obj).__name__} "
            f"({type(error).__name__}: {without_code(error)}). Send something that can be pickled, for example "
            "a state_dict."
        )
        return cloudpickle.dumps(_Failed(coded(OperationCode.UNPICKLABLE, sentence))), error


def _loads(payload: memoryview, kept: Sequence[Any] = ()) -> Any:
    received = _KeepingUnpickler(io.BytesIO(payload), kept).load() if kept else cloudpickle.loads(payload)
    if isinstance(received, _Failed):
        raise ValueError(received.sentence)
    return received
