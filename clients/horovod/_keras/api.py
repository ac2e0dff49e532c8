"""What horovod.keras and horovod.tensorflow.keras offer alike: the optimizers and the collectives on values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from horovod._keras.backends import backend_for, backend_of
from horovod._keras.kinds import distributed_keras, register_local_var
from horovod._keras.older_code import older_file
from horovod._keras.state import weights_of
from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Average
from horovod.common.gradients import Reduction, groups_of
from horovod.common.ops.faces import KERAS, complete
from horovod.common.ops.specs import reduce_op
from horovod.common.optimizer_numbers import Made
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.signatures import name_reductions

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "reducescatter",
]

_Optimizer = TypeVar("_Optimizer")


def DistributedOptimizer(  # noqa: N802
    optimizer: _Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> _Optimizer:
    """The optimizer, which from now on reduces gradients over all ranks before it applies them. Example:

        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size())), loss="mse")

    `optimizer.register_local_var(variable)` says that the gradient of a variable stays that of its rank.

    Args:
        optimizer: of Keras; it becomes the distributed one, with its state.
        name: of the optimizer.
        device_dense, device_sparse: of the operations.
        compression: how gradients are sent, for example Compression.fp16.
        sparse_as_dense: make tf.IndexedSlices, as embeddings have, dense before they are reduced.
        gradient_predivide_factor: with Average, divides by this before and by size / this after the sum.
        op: hvd.Average or hvd.Sum.
        backward_passes_per_step: sum up the gradients of so many passes before they are reduced and applied. In other
            passes only `iterations` counts.
        average_aggregated_gradients: divide that sum by their number.
        num_groups: deprecated, use groups.
        groups: reduce gradients together: a number of groups of equal length, or lists of variables.
        process_set: the ranks that take part.
        scale_local_gradients: divide gradients of variables that stay by the number of ranks.

    Raises:
        ValueError, NotImplementedError: arguments that contradict each other, an optimizer of no Keras.
    """
    reduction = Reduction(
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups_of(groups, num_groups),
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        device_dense=device_dense,
        device_sparse=device_sparse,
        scale_local_gradients=scale_local_gradients,
    )
    return distributed_keras(optimizer, reduction, backward_passes_per_step, average_aggregated_gradients, name)


def PartialDistributedOptimizer(  # noqa: N802
    optimizer: _Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> _Optimizer:
    """`DistributedOptimizer` for models of which some layers are this rank's own.

    Takes and raises what `DistributedOptimizer` does, and

    local_layers: a Keras layer or a list of them, whose weights exist; else ValueError. Give their weights to
    `BroadcastGlobalVariablesCallback(0, local_variables=...)` as well, if they are to differ from the beginning.

    >>> optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.01), local_layers=[model.layers[0]])
    """
    local = weights_of(local_layers)
    optimizer = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in local:
        register_local_var(optimizer, variable)
    return optimizer


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = None,
) -> Any:
    """The reduction of a number, an array or a tensor over all ranks, as a tensor of Keras's backend. Example:

        >>> float(hvd.allreduce(float(hvd.rank())))  # on ranks 0 and 1
        0.5

    The result is a tf.Tensor, or with the backend PyTorch a torch.Tensor on the device of `value` (the CPU for numbers
    and arrays) through which no gradient goes, with JAX a jax.Array. `numpy.asarray` takes each.
    """
    backend = backend_for(value)
    kind = backend.no_compression if compression is None else compression
    return backend.allreduce(value, name, reduce_op(op, average), prescale_factor, postscale_factor, kind)


def allgather(value: Any, name: str | None = None) -> Any:
    """The values of all ranks, one after the other along the first dimension, as `allreduce` returns it.

    >>> numpy.asarray(hvd.allgather(numpy.array([hvd.rank()]))).tolist()  # on ranks 0 and 1
    [0, 1]
    """
    return backend_for(value).allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The value that `root_rank` has, as `allreduce` returns it.

    >>> float(hvd.broadcast(float(hvd.rank()), root_rank=1))
    1.0
    """
    return backend_for(value).broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """This rank's rows of the average or sum of `value` over all ranks, as `allreduce` returns it.

    >>> numpy.asarray(hvd.reducescatter(numpy.array([1.0, 2.0]), op=hvd.Sum)).tolist()
    [2.0]  # on rank 0; [4.0] on rank 1
    """
    return backend_for(value).reducescatter(value, name, op)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Blocks until every rank of `process_set` has called it, outside of compiled functions.

    >>> if hvd.local_rank() == 0:
    ...     download()  # once for each host
    >>> hvd.barrier()
    """
    backend_for(None).barrier(process_set)


def load_model(
    keras: Any,
    filepath: Any,
    custom_optimizers: Iterable[type] | None,
    custom_objects: Mapping[str, Any] | None,
    compression: Any,
) -> Any:
    """A saved model, whose optimizer is distributed, with its state. It may have been saved with or without Horovod.

    Example:

        >>> model = hvd.load_model("model.keras")
        >>> model.fit(images, labels)

    Args:
        filepath: as for Keras's load_model.
        custom_optimizers: classes of optimizers that are not Keras's own.
        custom_objects: as for Keras's load_model.
        compression: how gradients are sent, for example Compression.fp16.
        legacy_opts: accepted for scripts of older releases.

    Raises:
        ValueError: a file of Keras 2 that Keras 3 does not read; also the errors of Keras's load_model.
    """
    ours: dict[str, Any] = {}
    with contextlib.suppress(AttributeError):
        ours = {"SyncBatchNormalization": sync_batch_norm(keras)}
    objects = ours | {one.__name__: one for one in custom_optimizers or ()} | dict(custom_objects or {})
    try:
        model = keras.models.load_model(filepath, custom_objects=objects or None)
    except (ValueError, TypeError) as error:
        if hint := older_file(keras, filepath):
            raise ValueError(coded(TrainingCode.OLDER_MODEL_FILE, f"{str(error).rstrip('.')}. {hint}")) from error
        raise
    if getattr(model, "optimizer", None) is not None:
        reduction = Reduction(compression=compression)
        # A rank may load a model only to look at it, or to go on with it while others go on with theirs.
        made = Made(["gradient"], reduction.process_set, is_from_file=True)
        distributed_keras(model.optimizer, reduction, made=made)
    return model


def sync_batch_norm(keras: Any) -> Any:
    """The layer of Horovod for a Keras and its backend; saved models may name it.

    TensorFlow's layer exists for one of the two Keras only; for the other this raises AttributeError.
    """
    if keras.backend.backend() != "tensorflow":
        from horovod._keras.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    return backend_of(keras).sync_batch_norm(keras)


complete(KERAS, globals())
name_reductions(globals())
