"""How the engine takes a torch tensor, and gives one back.

The engine knows no torch. It reads a tensor through the functions in C that torch offers for that (READER); what those
can't say goes to `in_place_span`: (input address, output address, dtype code, shape), and on a GPU its number and the
CUDA stream that writes the tensor. What the engine can't take is refused here, with a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
import torch.utils.dlpack

from horovod._core import TensorReader
from horovod.common.exceptions import HorovodInternalError
from horovod.worker.runtime.context import current, is_initialized
from horovod.worker.runtime.gpu import gpu_obstacle

if TYPE_CHECKING:
    from horovod._core import Output

Span: TypeAlias = tuple[int, int, int, tuple[int, ...]] | tuple[int, int, int, tuple[int, ...], int, int]
# What the engine takes for a tensor: it itself, changed in place; with a tensor for the result, or None where only the
# engine knows its size (see `adopt`); or addresses.
Given: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None] | Span

# Numbers of horovod.protos.v1.types_pb2.DataType.
DTYPE_CODES: Final[dict[torch.dtype, int]] = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.bfloat16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bool: 9,
    torch.float8_e4m3fn: 11,
    torch.float8_e5m2: 12,
}
# Not every version of PyTorch has these.
_UNSIGNED: Final = {"uint16": 10, "uint32": 13, "uint64": 14}
DTYPE_CODES.update({getattr(torch, name): code for name, code in _UNSIGNED.items() if hasattr(torch, name)})
_DTYPES_OF_BYTES: Final = {code: dtype for dtype, code in DTYPE_CODES.items() if "float8" in str(dtype)}

_strided = torch.strided
_code_of = DTYPE_CODES.get
_from_dlpack = torch.utils.dlpack.from_dlpack


def in_place_span(tensor: torch.Tensor) -> Span:
    """Where a tensor is whose reduction replaces it."""
    try:
        code = _code_of(tensor.dtype)
        if code is None or tensor.layout is not _strided or not tensor.is_contiguous():
            raise refusal(tensor)
        if not tensor.is_cpu:
            return _device_span(tensor, code)
    except AttributeError:
        raise refusal(tensor) from None
    address = tensor.data_ptr()
    return address, address, code, tensor.shape


def _device_span(tensor: torch.Tensor, code: int) -> Span:
    if not tensor.is_cuda:
        raise refusal(tensor)
    address, device = tensor.data_ptr(), tensor.device.index
    return address, address, code, tensor.shape, device, current_stream(device)


def current_stream(device: int) -> int:
    """The handle of the CUDA stream on which torch queues its work on `device` now."""
    return torch.cuda.current_stream(device).cuda_stream


def new_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for the result of an operation on `tensor`."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not _strided:
        raise refusal(tensor)
    return torch.empty_like(tensor)


def check_tensor(tensor: torch.Tensor) -> None:
    """Refuses what is no tensor at all; whether the engine can take it shows when it does."""
    if not isinstance(tensor, torch.Tensor):
        raise refusal(tensor)


# Subclasses may change what a tensor is. `tensor.data = other` and `tensor.set_()` give a tensor another storage.
READER: Final = TensorReader(
    (torch.Tensor, torch.nn.Parameter), in_place_span, torch.Tensor.untyped_storage, torch.UntypedStorage.data_ptr
)


def adopt(output: Output | torch.Tensor) -> torch.Tensor:
    """A tensor on memory that the engine allocated, without a copy; the tensor keeps the memory alive.

    Where torch lets READER make tensors, it is one already.
    """
    if isinstance(output, torch.Tensor):
        return output
    dtype = _DTYPES_OF_BYTES.get(output.dtype)
    tensor = _from_dlpack(output.dlpack())
    return tensor if dtype is None else tensor.view(dtype)  # not every framework's DLPack knows these


def by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of tensors of equal dtype, in order of appearance: one engine operation carries one dtype."""
    groups: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(index)
    return list(groups.values())


def refusal(tensor: Any) -> Exception:
    """Why the engine can't take `tensor`; the message says what to do."""
    if not isinstance(tensor, torch.Tensor):
        return ValueError(f"A torch.Tensor is required, not {type(tensor).__name__}.")
    if tensor.layout is not _strided:
        return ValueError(
            f"Tensor layout {tensor.layout} is not supported: use hvd.sparse_allreduce_async for sparse tensors, "
            "or make it dense with .to_dense()."
        )
    if tensor.dtype not in DTYPE_CODES:
        advice = " Use torch.view_as_real(tensor)." if tensor.dtype.is_complex else ""
        return ValueError(f"Tensor type {tensor.dtype} is not supported.{advice}")
    if (obstacle := device_obstacle(tensor.device)) is not None:
        return ValueError(f"The tensor is on device {tensor.device}, {obstacle}")
    return ValueError("Tensor is required to be contiguous. Call .contiguous() on it first.")


def named(refusal: ValueError, operation: str, name: str | None) -> ValueError:
    """The same with the name under which the tensor was given, as the engine adds it where it reads tensors itself."""
    return refusal if name is None else ValueError(f"{refusal} It was given as '{operation}.{name}'.")


def device_obstacle(device: torch.device) -> str | None:
    """Why tensors on `device` can't be communicated, and what to do, to end a sentence; None where they can."""
    if device.type == "cpu":
        return None
    if device.type == "meta":
        return "which has no memory: give it some with .to_empty(device='cpu'), and values, first."
    if device.type != "cuda":
        return "which is not supported by this version: move it to the CPU with .cpu() first."
    missing = gpu_obstacle(current().settings if is_initialized() else None)
    return f"and can't be communicated there. {missing}" if missing else None


def check_one_device(tensors: Sequence[torch.Tensor]) -> None:
    """A grouped call moves all its tensors together, so they must live on one device."""
    for tensor in tensors:
        check_tensor(tensor)
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1:
        raise HorovodInternalError(f"Tensors in list must be on same device. Found: {', '.join(sorted(devices))}.")
