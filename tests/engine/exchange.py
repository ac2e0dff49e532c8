"""A framework of our own, whose tensors are read in C through DLPack's exchange functions."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import numpy as np
from dlpack import CPU, CUDA, DLTensor

KINDS = {"i": 0, "u": 1, "f": 2, "b": 6}


class DLManaged(ctypes.Structure):
    """DLManagedTensorVersioned."""


DLManaged._fields_ = (
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("manager", ctypes.c_void_p),
    ("deleter", ctypes.PYFUNCTYPE(None, ctypes.POINTER(DLManaged))),
    ("flags", ctypes.c_uint64),
    ("tensor", DLTensor),
)

FROM_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
TO_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.POINTER(DLManaged), ctypes.POINTER(ctypes.py_object))
CURRENT_STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class ExchangeApi(ctypes.Structure):
    pass


ExchangeApi._fields_ = (
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("previous", ctypes.POINTER(ExchangeApi)),
    ("unused", ctypes.c_void_p * 2),
    ("managed_to_object", TO_OBJECT),
    ("tensor_from_object", FROM_OBJECT),
    ("current_work_stream", CURRENT_STREAM),
)


class Tensor:
    """What the exchange function below says of it is what its members say."""

    __dlpack_c_exchange_api__: Any
    streams: ClassVar[dict[int, int]] = {0: 0}  # of GPUs

    def __init__(self, array: np.ndarray, strides: tuple[int, ...] | None = None, **said: Any) -> None:
        self.array = array
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.strides = (ctypes.c_int64 * array.ndim)(*strides) if strides else None
        kind, bits = KINDS[array.dtype.kind], 8 * array.dtype.itemsize
        self.said = {"data": array.ctypes.data, "device_type": CPU, "type_code": kind, "type_bits": bits, **said}


class Special(Tensor):
    """A subclass, which might say anything."""


@FROM_OBJECT
def tensor_from_object(tensor: Tensor, out: Any) -> int:
    if tensor.said.get("fails"):
        return -1
    found = DLTensor(type_lanes=1, dimensions=len(tensor.shape), shape=tensor.shape, **tensor.said)
    if tensor.strides is not None:
        found.strides = tensor.strides
    out[0] = found
    return 0


class Made:
    """A copy of a result, which is given back at once."""

    def __init__(self, managed: Any) -> None:
        tensor = managed.contents.tensor
        self.version = managed.contents.major
        self.shape = tuple(tensor.shape[: tensor.dimensions])
        self.strides = tuple(tensor.strides[: tensor.dimensions])
        self.type = (tensor.type_code, tensor.type_bits, tensor.type_lanes, tensor.device_type)
        data = ctypes.string_at(tensor.data, int(np.prod(self.shape)) * tensor.type_bits // 8)
        self.array = np.frombuffer(data, np.float32).reshape(self.shape)
        managed.contents.deleter(managed)


@TO_OBJECT
def managed_to_object(managed: Any, out: Any) -> int:
    made = Made(managed)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))  # the caller's reference
    out[0] = made
    return 0


@CURRENT_STREAM
def current_work_stream(device_type: int, device: int, out: Any) -> int:
    if device_type != CUDA or device not in Tensor.streams:
        return -1
    out[0] = Tensor.streams[device]
    return 0


API = ExchangeApi(1, 3, None, (None, None), managed_to_object, tensor_from_object, current_work_stream)
FUTURE = ExchangeApi(2, 0, ctypes.pointer(API))
ONLY_FUTURE = ExchangeApi(2, 0)
_NAME = b"dlpack_exchange_api"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def offer(api: ExchangeApi) -> Any:
    return _new_capsule(ctypes.addressof(api), _NAME, None)


Tensor.__dlpack_c_exchange_api__ = offer(API)
