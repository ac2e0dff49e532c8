"""Layers of flax.nnx that work over ranks:

>>> from horovod.jax.nnx import SyncBatchNorm
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.jax.batch_norm import check_axis_name, moments, normalized, split_axes

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(nnx.BatchNorm):
    """flax.nnx.BatchNorm over the batches of all ranks; their sizes may differ. Example:

        >>> class Model(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.dense, self.norm = nnx.Linear(4, 8, rngs=rngs), SyncBatchNorm(8, rngs=rngs)

    Takes the arguments of nnx.BatchNorm, with the same parameters and running averages, so checkpoints of one fit the
    other. `axis_name` stays None. All ranks must call it equally often in training, under nnx.jit or not; in evaluation
    it calls nobody. With hvd.DistributedOptimizer, ranks with batches of one size train as one process does with all
    rows.

    Args:
        process_set: the ranks whose batches are normalized together.

    Raises:
        ValueError: before hvd.init(); a process set that this rank is not a member of; an `axis_name`, which is for
            jax.pmap.
        HorovodInternalError: a rank was lost. In a compiled function it is jax.errors.JaxRuntimeError.
    """

    def __init__(
        self, num_features: int, *, process_set: ProcessSet = global_process_set, rngs: nnx.Rngs, **options: Any
    ) -> None:
        check_axis_name(options.get("axis_name"))
        super().__init__(num_features, rngs=rngs, **options)
        self.process_set = process_set

    def __call__(self, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None) -> jax.Array:
        by_average = self.use_running_average if use_running_average is None else use_running_average
        if by_average is None or by_average:  # without either, Flax says what to give
            return super().__call__(x, use_running_average, mask=mask)
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        x, _, _, scale, bias = self.promote_dtype((x, self.mean[...], self.var[...], scale, bias), dtype=self.dtype)
        features, axes = split_axes(x.ndim, self.axis)
        mean, variance = moments(x, axes, mask, self.process_set)
        for average, now in ((self.mean, mean), (self.var, variance)):
            after = self.momentum * average[...] + (1 - self.momentum) * now
            average[...] = jax.lax.stop_gradient(after).astype(average[...].dtype)
        return normalized(x, mean, variance, scale, bias, features, self.epsilon).astype(x.dtype)
