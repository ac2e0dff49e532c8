"""What travels for a torch tensor whose memory does not hold its values one after another, as the engine reads them.

    not contiguous      (transposed, channels_last, a slice with steps) a contiguous copy
    negative, conjugate (`z.conj().imag`: PyTorch notes the sign and leaves the memory as it is) the values themselves
    complex             the pairs of real numbers that torch.view_as_real shows, in a last dimension of 2

Sums, averages with real factors, and whatever moves rows treat pairs of real numbers as complex numbers are treated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from horovod.base.errors import OperationCode, coded


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
