"""Fewer bytes on the wire: how gradients are cast before a reduction and back after it.

A compressor is a class with two static methods, so that a user's own can be passed wherever `Compression.fp16` can:
`compress(tensor) -> (smaller tensor, context)` and `decompress(smaller tensor, context) -> tensor`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Base of all compressors. The context is whatever `decompress` needs to know about the original."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor that travels, and the context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The reduced tensor in the form of the original."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends the tensor as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Casts floating-point tensors to `dtype` and back; all others travel unchanged."""

    dtype: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if tensor.dtype.is_floating_point and tensor.dtype != cls.dtype:
            return tensor.to(cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """float16 on the wire: half the bytes of float32, largest finite value 65504."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """bfloat16 on the wire: half the bytes of float32 with its full range, 8 bits of precision."""

    dtype = torch.bfloat16


class Compression:
    """What `compression=` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
