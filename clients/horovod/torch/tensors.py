"""horovod.common.ops.framework for PyTorch: how the engine takes a torch tensor, and gives one back.

The engine knows no torch. It reads a tensor through the functions in C that torch offers for that; what those can't say
goes to `view`. What the engine can't take is refused here, with a sentence. For a tensor whose memory does not hold its
values one after another, as the engine reads them, another one travels:

    not contiguous      (transposed, channels_last, a slice with steps) a contiguous copy
    negative, conjugate (`z.conj().imag`: PyTorch notes the sign and leaves the memory as it is) the values themselves
    complex             the pairs of real numbers that torch.view_as_real shows, in a last dimension of 2

Sums, averages with real factors, and whatever moves rows treat pairs of real numbers as complex numbers are treated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.utils.dlpack

from horovod._core import DType, TensorReader
from horovod.base.errors import OperationCode, coded, without_code
from horovod.common.ops.framework import Indirect, Span
from horovod.common.ops.grouped import GroupedCollectives
from horovod.worker.runtime.context import current, is_member
from horovod.worker.runtime.devices import gpu_obstacle

if TYPE_CHECKING:
    from horovod._core import Output


# Older versions of PyTorch lack some of these types.
DTYPE_CODES: Final[dict[torch.dtype, int]] = {
    getattr(torch, dtype.name.lower()): int(dtype) for dtype in DType if hasattr(torch, dtype.name.lower())
}
_DTYPES_OF_BYTES: Final = {code: dtype for dtype, code in DTYPE_CODES.items() if "float8" in str(dtype)}

_strided = torch.strided
_code_of = DTYPE_CODES.get
_from_dlpack = torch.utils.dlpack.from_dlpack


class TorchFramework:
    """The adapter; see horovod.common.ops.framework.Framework."""

    def __init__(self) -> None:
        # Subclasses are left out: they may change what a tensor is. `tensor.data = other` and `tensor.set_()` give a
        # tensor another storage.
        self.reader: Final = TensorReader(
            (torch.Tensor, torch.nn.Parameter),
            self.view,
            torch.Tensor.untyped_storage,
            torch.UntypedStorage.data_ptr,
            torch.Tensor.is_neg,
        )

    @staticmethod
    def view(tensor: torch.Tensor) -> Span:
        try:
            code = _code_of(tensor.dtype)
            if code is None or tensor.layout is not _strided or not tensor.is_contiguous() or tensor.is_neg():
                raise refusal(tensor)
            if not tensor.is_cpu:
                return _device_span(tensor, code)
        except AttributeError:
            raise refusal(tensor) from None
        address = tensor.data_ptr()
        return address, address, code, tensor.shape

    @staticmethod
    def dtype(tensor: torch.Tensor) -> int | None:
        if not isinstance(tensor, torch.Tensor):
            raise refusal(tensor)
        return _code_of(tensor.dtype)

    @staticmethod
    def shape(tensor: torch.Tensor) -> tuple[int, ...]:
        if not isinstance(tensor, torch.Tensor):
            raise refusal(tensor)
        return tensor.shape

    @staticmethod
    def device(tensor: torch.Tensor) -> torch.device:
        if not isinstance(tensor, torch.Tensor):
            raise refusal(tensor)
        return tensor.device

    @staticmethod
    def allocate(tensor: torch.Tensor, *, filled: bool = False) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not _strided:
            raise refusal(tensor)
        made = torch.empty_like(tensor)
        if filled:
            with torch.no_grad():
                made.copy_(tensor)
        return made

    @staticmethod
    def adopt(output: Output | torch.Tensor) -> torch.Tensor:
        if isinstance(output, torch.Tensor):
            return output
        dtype = _DTYPES_OF_BYTES.get(output.dtype)
        tensor = _from_dlpack(output.dlpack())
        return tensor if dtype is None else tensor.view(dtype)  # not every framework's DLPack knows these

    @staticmethod
    def current_stream(device: int) -> int:
        return torch.cuda.current_stream(device).cuda_stream


def _device_span(tensor: torch.Tensor, code: int) -> Span:
    if not tensor.is_cuda:
        raise refusal(tensor)
    address, device = tensor.data_ptr(), tensor.device.index
    return address, address, code, tensor.shape, device, TorchFramework.current_stream(device)


def refusal(tensor: Any) -> Exception:
    """Why the engine can't take `tensor` (the message says what to do), or Indirect if it takes a stand-in."""
    if not isinstance(tensor, torch.Tensor):
        return ValueError(
            coded(OperationCode.NOT_A_TENSOR, f"A torch.Tensor is required, not {type(tensor).__name__}.")
        )
    if tensor.layout is not _strided:
        return ValueError(
            coded(
                OperationCode.UNSUPPORTED_LAYOUT,
                f"Tensor layout {tensor.layout} is not supported: use hvd.sparse_allreduce_async for sparse tensors, "
                "or make it dense with .to_dense().",
            )
        )
    if tensor.dtype not in DTYPE_CODES and not tensor.dtype.is_complex:
        return ValueError(coded(OperationCode.UNSUPPORTED_DTYPE, f"Tensor type {tensor.dtype} is not supported."))
    if (obstacle := device_obstacle(tensor.device)) is not None:
        return ValueError(
            coded(OperationCode.UNSUPPORTED_DEVICE, f"The tensor is on device {tensor.device}, {obstacle}")
        )
    return Indirect(functools.partial(stand_in, tensor))


def device_obstacle(device: torch.device) -> str | None:
    """Why tensors on `device` can't be communicated, and what to do, to end a sentence; None where they can."""
    if device.type == "cpu":
        return None
    if device.type == "meta":
        return "which has no memory: give it some with .to_empty(device='cpu'), and values, first."
    if device.type != "cuda":
        return "which is not supported by this version: move it to the CPU with .cpu() first."
    missing = gpu_obstacle(current().settings if is_member() else None)
    return f"and can't be communicated there. {without_code(missing)}" if missing else None


COLLECTIVES: Final = GroupedCollectives[torch.Tensor](TorchFramework())
READER: Final = COLLECTIVES.framework.reader


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor of real numbers travels itself."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_complex()


def stand_in(
    tensor: torch.Tensor, *, in_place: bool = False, by_rows: bool = False
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """See horovod.common.ops.framework.Indirect, of which this is `stand_in`."""
    if in_place:
        _check_distinct(tensor)
    with torch.no_grad():
        travelling = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if tensor.is_complex():
            # A scalar of two numbers would be two rows; as a scalar the ranks refuse it together.
            scalar = by_rows and tensor.dim() == 0
            travelling = travelling.real if scalar else torch.view_as_real(travelling)
    if not in_place:
        return travelling, _complex if tensor.is_complex() else _itself

    def write_back(result: torch.Tensor) -> torch.Tensor:
        if result.data_ptr() != tensor.data_ptr():
            with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
                tensor.copy_(torch.view_as_complex(result) if tensor.is_complex() else result)
        return tensor

    return travelling, write_back


def _complex(result: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(result).data  # not a view, which autograd would treat in a special way


def _itself(result: torch.Tensor) -> torch.Tensor:
    return result


def _check_distinct(tensor: torch.Tensor) -> None:
    """ValueError if elements may share a place in memory, so that a result can't be written to them."""
    reach = 0  # how far the last element lies from the first, in the dimensions that were looked at
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return
        if size > 1:
            if stride <= reach:
                break
            reach += stride * (size - 1)
    else:
        return
    raise ValueError(
        coded(
            OperationCode.OVERLAPPING,
            f"The result can't be written to a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}, of "
            "which several elements have one place in memory (made by expand() for example). Pass tensor.contiguous(), "
            "or use the function that returns a new tensor.",
        )
    )
