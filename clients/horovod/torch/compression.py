"""Fewer bytes on the wire. Two kinds of compressors, and both can be a user's own:

    Compressor            a class of two static functions, one before a reduction and one after it: another dtype, or
                          a part of the tensor. For every `compression=` there is.
    GradientCompressor    an object that remembers earlier steps and may reduce several tensors, one depending on the
                          other, for each gradient. For `DistributedOptimizer(compression=...)`.

What is made smaller must be something that can be reduced element by element, because that is what happens to it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from horovod.common.ops.compression import CastCompressor

__all__ = ["Compression", "Compressor", "GradientCompressor"]


class Compressor:
    """Base of the compressors that are two functions. Pass the class, not an instance. Example:

    >>> class Rounded(Compressor):
    ...     @staticmethod
    ...     def compress(tensor):
    ...         return tensor.to(torch.bfloat16), tensor.dtype
    ...
    ...     @staticmethod
    ...     def decompress(tensor, ctx):
    ...         return tensor.to(ctx)
    >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=Rounded)
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor that is reduced in place of `tensor`, and anything `decompress` needs to know about `tensor`.

        `tensor` is dense and contiguous and must stay as it is. The returned tensor must be contiguous, of one shape
        and dtype on all ranks, and may be `tensor` itself. No gradient is recorded for DistributedOptimizer.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The reduced tensor with the shape and dtype of the original; `ctx` is what `compress` returned beside it."""
        raise NotImplementedError


class GradientCompressor:
    """Base of the compressors with memory. Pass an instance, one for each DistributedOptimizer. Example:

    >>> class Halves(GradientCompressor):  # every second step sends the other half of each gradient
    ...     def __init__(self):
    ...         self.steps = collections.Counter()
    ...
    ...     def reduce(self, name, gradient):
    ...         self.steps[name] += 1
    ...         half = gradient.view(-1)[self.steps[name] % 2 :: 2].contiguous()
    ...         yield half
    ...         gradient.zero_().view(-1)[self.steps[name] % 2 :: 2] = half
    ...         return gradient
    >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=Halves())

    `examples/torch_powersgd.py` is one that is worth using.
    """

    def reduce(self, name: str, gradient: torch.Tensor) -> Generator[torch.Tensor, None, torch.Tensor]:
        """Reduces one gradient: yields the tensors to send, returns the gradient of the step.

        Each tensor that is yielded is reduced in place with the optimizer's op, factors and process set; the generator
        goes on when it holds the result. The code before the first yield runs in the backward pass, which continues
        while that tensor is reduced; the rest runs in `step()` or `synchronize()`, where the second tensors of all
        gradients are reduced together, then the third ones, and so on. No gradient is recorded.

        All ranks must yield tensors of the same shapes and dtypes in the same order. Only their values may
        depend on the rank.

        Args:
            name: of the parameter. The key under which to remember what belongs to it.
            gradient: dense and contiguous, the parameter's shape (complex numbers: as torch.view_as_real shows
                them); may be changed, yielded and returned.

        Returns:
            A tensor of the same shape. It is copied into the parameter's `.grad` if it is not `gradient` itself.
        """
        raise NotImplementedError(f"{type(self).__name__} must define reduce(name, gradient).")


class NoneCompressor(Compressor):
    """Sends the tensor as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _CastCompressor(CastCompressor, Compressor):
    """Casts floating-point tensors to `dtype` and back; all others travel unchanged."""

    @staticmethod
    def is_floating(tensor: torch.Tensor) -> bool:
        return tensor.dtype.is_floating_point

    @staticmethod
    def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)


class FP16Compressor(_CastCompressor):
    """float16 on the wire: half the bytes of float32, largest finite value 65504."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """bfloat16 on the wire: half the bytes of float32 with its full range, 8 bits of precision."""

    dtype = torch.bfloat16


class Compression:
    """The compressors that `compression=` accepts.

    >>> hvd.allreduce(torch.ones(2), compression=hvd.Compression.fp16)  # travels as float16
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
