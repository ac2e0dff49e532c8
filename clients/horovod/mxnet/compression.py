"""Fewer bytes on the wire: arrays are cast to a smaller dtype before an operation and back after it."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

from horovod.common.ops.compression import CastCompressor
from horovod.mxnet.arrays import BFLOAT16

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Base of compressors, of which users may write their own. Pass the class, not an instance."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the array to reduce in place of `tensor`, and a context for `decompress`.

        The shape and dtype of that array must be the same on all ranks.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The reduced array with the shape and dtype of the original; `ctx` is what `compress` returned beside it."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends the array as it is."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class _CastCompressor(CastCompressor, Compressor):
    """Casts floating-point arrays to `dtype` and back; all others travel unchanged."""

    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return np.dtype(tensor.dtype).kind == "f"

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        array = tensor.as_nd_ndarray().astype(dtype)  # an mx.np array's astype knows no bfloat16
        return array.as_np_ndarray() if isinstance(tensor, mx.np.ndarray) else array


class FP16Compressor(_CastCompressor):
    """float16 on the wire: half the bytes of float32, largest finite value 65504."""

    dtype = np.float16


class BF16Compressor(_CastCompressor):
    """bfloat16 on the wire: half the bytes of float32 with its full range, 8 bits of precision."""

    dtype = BFLOAT16


class Compression:
    """The compressors that `compression=` accepts.

    >>> hvd.allreduce(mx.nd.ones(2), compression=hvd.Compression.fp16)  # travels as float16
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
