"""Layers of flax.linen that work over ranks:

>>> from horovod.jax.linen import SyncBatchNorm
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.jax.batch_norm import check_axis_name, moments, normalized, split_axes

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(linen.BatchNorm):
    """flax.linen.BatchNorm over the batches of all ranks; their sizes may differ. Example:

        >>> class Model(linen.Module):
        ...     @linen.compact
        ...     def __call__(self, rows, train):
        ...         return SyncBatchNorm(use_running_average=not train)(linen.Dense(8)(rows))

    Takes the arguments of linen.BatchNorm, with the same parameters and running averages, so checkpoints of one fit the
    other where the layer has a `name`: Flax names others by their class. `axis_name` stays None. All ranks must call it
    equally often in training, under jax.jit or not; in evaluation and in `init` it calls nobody. With
    hvd.DistributedOptimizer, ranks with batches of one size train as one process does with all rows.

    Args:
        process_set: the ranks whose batches are normalized together.

    Raises:
        ValueError: before hvd.init(); a process set that this rank is not a member of; an `axis_name`, which is for
            jax.pmap.
        HorovodInternalError: a rank was lost. In a compiled function it is jax.errors.JaxRuntimeError.
    """

    process_set: ProcessSet = global_process_set

    def __call__(self, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None) -> jax.Array:
        check_axis_name(self.axis_name)
        by_average = linen.merge_param("use_running_average", self.use_running_average, use_running_average)
        params = self.variables.get("params", {})
        is_whole = params.keys() >= {
            name for name, used in (("scale", self.use_scale), ("bias", self.use_bias)) if used
        }
        if by_average or self.is_initializing() or not is_whole:  # Flax says which parameters are missing
            return super().__call__(x, use_running_average, mask=mask)
        features, axes = split_axes(x.ndim, self.axis)
        mean, variance = moments(x, axes, mask, self.process_set)
        least = jnp.float32 if self.force_float32_reductions else self.param_dtype
        for name, now in (("mean", mean), ("var", variance)):
            # If a model is applied without averages, they start here, as in Flax.
            first = jnp.full([x.shape[axis] for axis in features], float(name == "var"), least)
            average = self.get_variable("batch_stats", name, first)
            after = self.momentum * average + (1 - self.momentum) * now
            self.put_variable("batch_stats", name, after.astype(average.dtype))
        scale, bias = params.get("scale"), params.get("bias")
        given = [one for one in (x, scale, bias) if one is not None]
        result = normalized(x, mean, variance, scale, bias, features, self.epsilon)
        return result.astype(linen.dtypes.canonicalize_dtype(*given, dtype=self.dtype))
