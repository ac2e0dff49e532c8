"""Names of horovod.tensorflow that scripts of earlier releases use (horovod/common/compatibility.py says more)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common.basics import Average
from horovod.common.compatibility import HorovodBasics
from horovod.common.compatibility import (
    handle_average_backwards_compatibility as handle_average_backwards_compatibility,
)
from horovod.common.gradients import Reduction
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import gpu_available as gpu_available
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.gradients import reduced
from horovod.tensorflow.ops.allreduce import _allreduce as _allreduce
from horovod.tensorflow.ops.allreduce import _grouped_allreduce as _grouped_allreduce
from horovod.tensorflow.util import _cache as _cache
from horovod.tensorflow.util import _executing_eagerly as _executing_eagerly
from horovod.tensorflow.util import _make_subgraph as _make_subgraph
from horovod.tensorflow.util import refs_to_vars as refs_to_vars
from horovod.tensorflow.util import vars_to_refs as vars_to_refs
from horovod.tensorflow.v1_optimizer import _DistributedOptimizer as _DistributedOptimizer

_LegacyOptimizer = tf.compat.v1.train.Optimizer
_basics = HorovodBasics()


def _make_allreduce_grads_fn(
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[..., list[Any]]:
    """A function of gradients, and of the variables that they belong to, which returns them reduced over the ranks.

    It has the arguments of hvd.DistributedOptimizer. name: of the operations' scope.
    """
    reduction = Reduction(
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )

    def allreduce_grads(
        grads: Sequence[Any],
        vars: Sequence[Any] | None = None,  # noqa: A002
        use_generic_names: bool = False,
    ) -> list[Any]:
        known = [None] * len(grads) if vars is None else vars
        with tf.name_scope(name or "DistributedGradients"):
            return reduced(list(grads), known, reduction, generic_names=use_generic_names or vars is None)

    return allreduce_grads
