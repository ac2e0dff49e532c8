"""Mean and variance over the batches of all ranks: what the layers of horovod.jax.linen and horovod.jax.nnx share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Sum
from horovod.common.ops.specs import set_size
from horovod.common.process_sets import ProcessSet
from horovod.jax.compression import Compression
from horovod.jax.reductions import allreduce_of


def moments(inputs: jax.Array, axes: Sequence[int], mask: Any, process_set: ProcessSet) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of the values of all ranks along `axes`, in float32 at least. Differentiable.

    mask: which values take part, of a shape that broadcasts to that of `inputs`; None: all. Ranks may have different
    numbers of values; a rank may have none.

    Two allreduces forward, and two backward. The variance is taken around the mean of all ranks: the difference of the
    mean square and the squared mean would lose the digits that single precision has.
    """
    values = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
    taken = None if mask is None else jnp.broadcast_to(mask, values.shape).astype(bool)

    def summed(some: jax.Array) -> jax.Array:
        return jnp.sum(some, axes, where=taken)

    sums = summed(values)
    # As many counts as sums: with a mask, channels may differ.
    counts = jnp.full(sums.shape, values.size // max(sums.size, 1)) if taken is None else jnp.sum(taken, axes)
    counts = counts.astype(values.dtype)
    counts, sums = _of_all([counts, sums], "mean", process_set)
    mean = sums / counts
    squares = summed(jnp.square(values - jnp.expand_dims(mean, axes)))
    (squares,) = _of_all([squares], "variance", process_set)
    return mean, squares / counts


def normalized(
    inputs: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    features: Sequence[int],
    epsilon: float,
) -> jax.Array:
    """`inputs` with mean 0 and variance 1, times `scale`, plus `bias`, in the wider of the dtypes.

    mean, variance, scale, bias: of the shape that `inputs` has along its axes `features`.
    """
    shape = [inputs.shape[axis] if axis in features else 1 for axis in range(inputs.ndim)]
    factor = jax.lax.rsqrt(variance + epsilon)
    if scale is not None:
        factor = factor * scale
    result = (inputs - mean.reshape(shape)) * factor.reshape(shape)
    return result if bias is None else result + bias.reshape(shape)


def split_axes(count: int, features: int | Sequence[int]) -> tuple[list[int], list[int]]:
    """Of `count` axes, those of the features, and those along which values are reduced."""
    given = [features] if isinstance(features, int) else features
    own = sorted({axis % count for axis in given})
    return own, [axis for axis in range(count) if axis not in own]


def check_axis_name(axis_name: Any) -> None:
    if axis_name is not None:
        sentence = (
            "SyncBatchNorm of Horovod normalizes over ranks by itself. Leave out axis_name, which names the devices of "
            "one process in jax.pmap and jax.shard_map."
        )
        raise ValueError(coded(TrainingCode.CONTRADICTORY_ARGUMENTS, sentence))


def _of_all(values: list[jax.Array], what: str, process_set: ProcessSet) -> list[jax.Array]:
    if set_size(process_set) == 1:
        return values
    # One name for each number of channels, as what a name means stays the same on all ranks then.
    content = f"sync_batch_norm.{what}.{values[0].size}"
    return allreduce_of(content, values, False, Compression.none, Sum, 1.0, 1.0, process_set)
