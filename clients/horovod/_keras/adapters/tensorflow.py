"""Keras on TensorFlow: a Backend (backends.py), with what only TensorFlow has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod import tensorflow as hvd
from horovod._keras.adapters.tf_keras import distribute_tf_keras
from horovod._keras.keras3 import _DistributedOptimizer
from horovod.common.gradients import Reduction
from horovod.common.optimizer_numbers import Made
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.unreduced import Steps
from horovod.tensorflow import gradients as of_tensorflow
from horovod.tensorflow.aggregation import LocalGradientAggregation as Aggregation
from horovod.tensorflow.gradients import agreed
from horovod.tensorflow.library import as_it_is
from horovod.tensorflow.once import are_reduced
from horovod.tensorflow.plain_optimizers import stepped

__all__ = [
    "Aggregation",
    "Compression",
    "agreed",
    "allgather",
    "allreduce",
    "applied",
    "barrier",
    "broadcast",
    "broadcast_variables",
    "compares_steps",
    "distribute_tf_keras",
    "no_compression",
    "reduced_but_local",
    "reducescatter",
    "sync_batch_norm",
]

Compression = hvd.Compression
barrier = hvd.barrier
no_compression = Compression.none
compares_steps = True


def reduced_but_local(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    local: set[int],
    reduction: Reduction,
    optimizer: Any = None,
    made: Made | None = None,
) -> list[Any]:
    """The reduced gradients. Gradients that a tape has reduced stay unchanged."""
    if are_reduced(gradients, variables, reduction, local):
        return list(gradients)
    return of_tensorflow.reduced_but_local(gradients, variables, local, reduction, optimizer=optimizer, made=made)


as_it_is(_DistributedOptimizer.apply, reduced_but_local)


def applied(optimizer: Any, steps: Steps, gradients: Sequence[Any]) -> None:
    """Traced, where the loop is a tf.function."""
    stepped(optimizer, steps)


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> object:
    return hvd.broadcast_variables(variables, root_rank, process_set=process_set)


def allreduce(value: Any, name: str | None, op: int, prescale: float, postscale: float, compression: Any) -> Any:
    return hvd.allreduce(
        tf.convert_to_tensor(value),
        name=name,
        op=op,
        prescale_factor=prescale,
        postscale_factor=postscale,
        compression=compression,
    )


def allgather(value: Any, name: str | None) -> Any:
    return hvd.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None) -> Any:
    return hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None, op: int) -> Any:
    return hvd.reducescatter(tf.convert_to_tensor(value), name=name, op=op)


def sync_batch_norm(keras: Any) -> Any:
    """The layer of horovod.tensorflow. Raises AttributeError if that belongs to the other Keras."""
    # Late: it is a subclass of a layer of tf.keras, which TensorFlow imports when it is first asked for.
    from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

    if issubclass(SyncBatchNormalization, keras.layers.Layer):
        return SyncBatchNormalization
    raise AttributeError(
        "SyncBatchNormalization is a layer of tf.keras, which is another Keras here (TF_USE_LEGACY_KERAS)."
    )
