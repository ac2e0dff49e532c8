"""Fewer bytes on the wire: arrays are cast to a smaller dtype before an operation and back after it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from horovod.common.ops.compression import CastCompressor

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Base of compressors, of which users may write their own. Pass the class, not an instance. Example:

    >>> class Rounded(hvd.Compression.none):
    ...     @staticmethod
    ...     def compress(tensor):
    ...         return tensor.astype(jnp.bfloat16), tensor.dtype
    ...
    ...     @staticmethod
    ...     def decompress(tensor, ctx):
    ...         return tensor.astype(ctx)

    Under jax.jit both are traced.
    """

    @staticmethod
    def compress(tensor: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the array to reduce in place of `tensor`, and a context for `decompress`.

        The shape and dtype of that array must be the same on all ranks.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: jax.Array, ctx: Any) -> jax.Array:
        """The reduced array with the shape and dtype of the original; `ctx` is what `compress` returned beside it."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends the array as it is."""

    @staticmethod
    def compress(tensor: jax.Array) -> tuple[jax.Array, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: jax.Array, ctx: Any) -> jax.Array:
        return tensor


class _CastCompressor(CastCompressor, Compressor):
    """Casts floating-point arrays to `dtype` and back; all others travel unchanged."""

    @staticmethod
    def is_floating(tensor: jax.Array) -> bool:
        return bool(jnp.issubdtype(tensor.dtype, jnp.floating))

    @staticmethod
    def cast(tensor: jax.Array, dtype: Any) -> jax.Array:
        return tensor.astype(dtype)


class FP16Compressor(_CastCompressor):
    """float16 on the wire: half the bytes of float32, largest finite value 65504."""

    dtype = jnp.dtype(jnp.float16)


class BF16Compressor(_CastCompressor):
    """bfloat16 on the wire: half the bytes of float32 with its full range, 8 bits of precision."""

    dtype = jnp.dtype(jnp.bfloat16)


class Compression:
    """The compressors that `compression=` accepts.

    >>> hvd.allreduce(jnp.ones(2), compression=hvd.Compression.fp16)  # travels as float16
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
