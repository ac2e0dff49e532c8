"""horovod.common.ops.framework for MXNet: how the engine takes an NDArray in the host's memory, and gives one back.

MXNet's engine runs what a script writes later, on threads of its own. The address of an array is taken only when all
that was queued for it before, reads and writes, has been done, and MXNet counts this as a write. What the script queues
afterwards runs after the collective, whose call returns when the result is in that memory.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from horovod._core import DType, Output, TensorReader
from horovod.base.errors import OperationCode, coded
from horovod.common.ops.framework import Span
from horovod.common.ops.grouped import GroupedCollectives
from horovod.mxnet.errors import lost_ranks

BFLOAT16: Final[np.dtype[Any]] = np.dtype([("bfloat16", np.uint16)])  # how MXNet lays out bfloat16

DTYPE_CODES: Final[dict[np.dtype[Any], int]] = {
    BFLOAT16 if dtype.name == "BFLOAT16" else np.dtype(dtype.name.lower()): int(dtype)
    for dtype in DType
    if "FLOAT8" not in dtype.name
}
_DTYPES: Final = {code: dtype for dtype, code in DTYPE_CODES.items()}


class MXNetFramework:
    """The adapter; see horovod.common.ops.framework.Framework."""

    def __init__(self) -> None:
        self.reader: Final = TensorReader((), self.view)

    @staticmethod
    def view(tensor: Any) -> Span:
        code = MXNetFramework.dtype(tensor)
        if code is None or tensor.stype != "default" or not _in_host_memory(tensor):
            raise refusal(tensor)
        address = _address(tensor)
        return address, address, code, tensor.shape

    @staticmethod
    def dtype(tensor: Any) -> int | None:
        return DTYPE_CODES.get(np.dtype(_checked(tensor).dtype))

    @staticmethod
    def shape(tensor: Any) -> tuple[int, ...]:
        shape: tuple[int, ...] = _checked(tensor).shape
        return shape

    @staticmethod
    def device(tensor: Any) -> str:
        return str(_checked(tensor).context)

    @staticmethod
    def allocate(tensor: Any, *, filled: bool = False) -> Any:
        if MXNetFramework.dtype(tensor) is None or tensor.stype != "default":
            raise refusal(tensor)
        if filled:
            return tensor.copy()
        return _empty(tensor.shape, tensor.dtype, isinstance(tensor, mx.np.ndarray), tensor.context)

    @staticmethod
    def adopt(output: Output | Any) -> Any:
        """A copy: MXNet can't take over memory of every dtype."""
        assert isinstance(output, Output)
        made = _empty(output.shape, _DTYPES[output.dtype], mx.util.is_np_array(), mx.cpu())
        if output.nbytes:
            memory = np.frombuffer(memoryview(output).cast("B"), np.uint8)
            ctypes.memmove(_address(made), memory.ctypes.data, output.nbytes)
        return made

    @staticmethod
    def current_stream(device: int) -> int:
        raise NotImplementedError  # not reached: no array on a GPU gets this far


def refusal(tensor: Any) -> ValueError:
    """Why the engine can't take `tensor`; the message says what to do."""
    if not isinstance(tensor, mx.nd.NDArray):
        return ValueError(coded(OperationCode.NOT_A_TENSOR, f"An NDArray is required, not {type(tensor).__name__}."))
    if tensor.stype != "default":
        return ValueError(
            coded(
                OperationCode.UNSUPPORTED_LAYOUT,
                f'Arrays of the storage type {tensor.stype} are not supported. Make it dense with .tostype("default").',
            )
        )
    if np.dtype(tensor.dtype) not in DTYPE_CODES:
        return ValueError(coded(OperationCode.UNSUPPORTED_DTYPE, f"Arrays of {tensor.dtype} are not supported."))
    return ValueError(
        coded(
            OperationCode.UNSUPPORTED_DEVICE,
            f"The array is on {tensor.context}, and arrays of MXNet are sent from the host's memory only. Move it "
            "there with .as_in_context(mx.cpu()).",
        )
    )


def counts(rows: list[int]) -> Any:
    """How many rows came from each rank, as an array."""
    array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    return array(rows, dtype="int32")


def _checked(tensor: Any) -> Any:
    if not isinstance(tensor, mx.nd.NDArray):
        raise refusal(tensor)
    return tensor


def _in_host_memory(tensor: Any) -> bool:
    return bool(tensor.context.device_type.startswith("cpu"))


def _address(tensor: Any) -> int:
    with lost_ranks():
        check_call(_LIB.MXNDArrayWaitToWrite(tensor.handle))
    pointer = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(tensor.handle, ctypes.byref(pointer)))
    return pointer.value or 0


def _empty(shape: tuple[int, ...], dtype: Any, of_numpy: bool, context: Any) -> Any:
    with mx.util.np_shape(True):  # otherwise a 0 in a shape means an unknown size
        made = mx.nd.empty(shape, context, dtype)
    return made.as_np_ndarray() if of_numpy else made


COLLECTIVES: Final = GroupedCollectives[Any](MXNetFramework())
