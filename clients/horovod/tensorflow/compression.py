"""Fewer bytes on the wire: tensors are cast to a smaller dtype before an operation and back after it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod.common.ops.compression import CastCompressor

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Base of compressors, of which users may write their own. Pass the class, not an instance. Example:

    >>> class Rounded(hvd.Compression.none):
    ...     @staticmethod
    ...     def compress(tensor):
    ...         return tf.cast(tensor, tf.bfloat16), tensor.dtype
    ...
    ...     @staticmethod
    ...     def decompress(tensor, ctx):
    ...         return tf.cast(tensor, ctx)
    """

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """The tensor to reduce instead, of one shape and dtype on all ranks, and the context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """The reduced tensor with the shape and dtype of the original; `ctx` is what `compress` returned beside it."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends the tensor as it is."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor


class _CastCompressor(CastCompressor, Compressor):
    """Casts floating-point tensors to `dtype` and back; all others travel unchanged."""

    @staticmethod
    def is_floating(tensor: tf.Tensor) -> bool:
        return bool(tensor.dtype.is_floating)

    @staticmethod
    def cast(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(tensor, dtype)


class FP16Compressor(_CastCompressor):
    """float16 on the wire: half the bytes of float32, largest finite value 65504."""

    dtype = tf.float16


class BF16Compressor(_CastCompressor):
    """bfloat16 on the wire: half the bytes of float32 with its full range, 8 bits of precision."""

    dtype = tf.bfloat16


class Compression:
    """The compressors that `compression=` accepts.

    >>> hvd.allreduce(tf.ones(2), compression=hvd.Compression.fp16)  # travels as float16
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
