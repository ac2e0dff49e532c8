"""Compressors, which make what travels smaller, around an operation; any framework's.

A compressor has `compress(tensor)`, which returns what travels and a context, and `decompress(tensor, context)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


class CastCompressor:
    """Casts floating-point tensors to `dtype` and back; all others travel unchanged. Frameworks add two functions."""

    dtype: ClassVar[Any]

    @staticmethod
    def is_floating(tensor: Any) -> bool:
        raise NotImplementedError

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        if cls.is_floating(tensor) and tensor.dtype != cls.dtype:
            return cls.cast(tensor, cls.dtype), tensor.dtype
        return tensor, None

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else cls.cast(tensor, ctx)


def compressed(compression: Any, tensor: T, operation: Callable[..., T], *arguments: Any) -> T:
    """operation(tensor, *arguments), with the tensor compressed meanwhile."""
    small, context = compression.compress(tensor)
    result: T = compression.decompress(operation(small, *arguments), context)
    return result


def compressed_group(
    compression: Any, tensors: Iterable[T], operation: Callable[..., Sequence[T]], *arguments: Any
) -> list[T]:
    """The same for an operation of several tensors."""
    packed = [compression.compress(tensor) for tensor in tensors]
    results = operation([small for small, _ in packed], *arguments)
    return [compression.decompress(result, context) for result, (_, context) in zip(results, packed, strict=True)]
