"""hvd.DistributedOptimizer of horovod.tensorflow: for optimizers of Keras 3, tf_keras and tf.compat.v1.train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import tensorflow as tf

from horovod._keras.held import OPTIMIZER
from horovod._keras.kinds import distributed_keras
from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Adasum, Average
from horovod.common.counted_weights import Thing
from horovod.common.gradients import Reduction, check_passes, groups_of, identity
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import plain_optimizers as plain_optimizers
from horovod.tensorflow.aggregation import LocalGradientAggregation
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.gradients import compared_before, compared_before_applied, reduced, reduced_but_local
from horovod.tensorflow.once import check_reduced, hand_out

__all__ = ["DistributedOptimizer"]

_Optimizer = TypeVar("_Optimizer")


def DistributedOptimizer(  # noqa: N802
    optimizer: _Optimizer,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> _Optimizer:
    """An optimizer that reduces gradients over all ranks before it applies them. Example:

        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))

    `optimizer.register_local_var(variable)` excludes a variable: each rank applies its own gradient of it.

    Args:
        optimizer: an optimizer of Keras, which becomes distributed and keeps its state; or one of tf.compat.v1.train.
        name, use_locking: arguments of an optimizer of tf.compat.v1.train.
        device_dense, device_sparse: devices of the operations for dense gradients and tf.IndexedSlices.
        compression: how gradients are sent, for example Compression.fp16.
        sparse_as_dense: make tf.IndexedSlices, as embeddings have, dense before they are reduced.
        backward_passes_per_step: sum the gradients of this many passes before they are reduced and applied. The other
            passes only count the step.
        op: hvd.Average or hvd.Sum; with tf.compat.v1.train also hvd.Adasum: each rank takes its own step, and the
            changes of the variables are combined.
        gradient_predivide_factor: with Average, divides by this before and by size / this after the sum.
        average_aggregated_gradients: divide the sum of several passes by their number.
        num_groups: deprecated, use groups.
        groups: reduce gradients together: a number of groups of equal length, or lists of variables.
        process_set: the ranks that take part. On other ranks gradients stay unchanged.
        scale_local_gradients: divide gradients of excluded variables by the number of ranks.

    Raises:
        ValueError, NotImplementedError: arguments that contradict each other or the optimizer, or an optimizer of an
            unknown kind.
        tf.errors.OpError: the errors of hvd.allreduce, when gradients are applied.
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
    check_passes(backward_passes_per_step)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return distributed_v1(
            optimizer, reduction, backward_passes_per_step, average_aggregated_gradients, name, use_locking
        )
    return distributed_keras(optimizer, reduction, backward_passes_per_step, average_aggregated_gradients, name)


_COMPUTE = (
    "Take gradients from this optimizer's compute_gradients() or minimize(), or from an hvd.DistributedGradientTape; "
    "they may be changed before they are applied."
)


def distributed_v1(
    optimizer: Any, reduction: Reduction, passes: int, average: bool, name: str | None, use_locking: bool
) -> Any:
    """A distributed optimizer around `optimizer`. Raises ValueError for what does not go together."""
    if passes > 1 and tf.executing_eagerly():
        raise ValueError(
            coded(
                TrainingCode.UNSUPPORTED_OPTIMIZER,
                "backward_passes_per_step > 1 is not supported for an optimizer of tf.compat.v1.train that is used "
                "eagerly. Use an optimizer of Keras.",
            )
        )
    if reduction.op == Adasum and average:
        raise ValueError(
            coded(TrainingCode.CONTRADICTORY_ARGUMENTS, "Adasum does not support average_aggregated_gradients.")
        )
    kind = _AdasumOptimizer if reduction.op == Adasum else _DistributedOptimizer
    return kind(optimizer, reduction, passes, average, name, use_locking)


class _Around(tf.compat.v1.train.Optimizer):
    """Reduces gradients in `compute_gradients`, or, for Adasum, changes of variables.

    Delegates what does not concern gradients to the user's optimizer, whose slots and variables it shows.
    """

    def __init__(
        self, optimizer: Any, reduction: Reduction, passes: int, average: bool, name: str | None, use_locking: bool
    ) -> None:
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._reduction = reduction
        self._local: dict[int, Any] = {}
        self._aggregation = LocalGradientAggregation(passes, average, reduction.sparse_as_dense) if passes > 1 else None

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays that of this rank, divided by the number of ranks."""
        self._local[identity(var)] = var

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)

    def _after_passes(self, gradients: Sequence[Any], variables: Sequence[Any], use: Any, global_step: Any) -> Any:
        """use(gradients), at once or with the sums of several passes; the operation to run."""
        if self._aggregation is None:
            return use(list(gradients))
        is_last = self._aggregation.add(gradients, variables)

        def last() -> tf.Tensor:
            with tf.control_dependencies([use(self._aggregation.take(variables))]):  # type: ignore[union-attr]
                return tf.constant(0)

        def not_yet() -> tf.Tensor:
            counted = [] if global_step is None else [global_step.assign_add(1)]
            with tf.control_dependencies(counted):
                return tf.constant(0)

        with tf.control_dependencies([is_last]):
            return tf.group(tf.cond(is_last, last, not_yet))


class _DistributedOptimizer(_Around):
    """Average and Sum."""

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Pairs (gradient, variable): reduced, if there is one pass for each step."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        if self._aggregation is not None or not pairs:
            return list(pairs)
        gradients, variables = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        results = self._reduced(gradients, variables)
        hand_out(results, variables, self._reduction, self)
        return list(zip(results, variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Applies what `compute_gradients` returned; with several passes for each step it reduces before.

        Raises ValueError for gradients that nobody has reduced.
        """
        pairs = list(grads_and_vars)
        if self._aggregation is None:
            check_reduced([pair[0] for pair in pairs], [pair[1] for pair in pairs], self._reduction, _COMPUTE)
            return self._apply(pairs, global_step, name)
        gradients, variables = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        _make_slots(self._optimizer, variables)

        def use(taken: list[Any]) -> Any:
            return self._apply(list(zip(self._reduced(taken, variables), variables, strict=True)), global_step, name)

        return self._after_passes(gradients, variables, use, global_step)

    def _apply(self, pairs: list[tuple[Any, Any]], global_step: Any, name: str | None) -> Any:
        compares: AbstractContextManager[None] = nullcontext()
        if not tf.compat.v1.executing_eagerly_outside_functions() and not tf.distribute.has_strategy():
            gradients, variables = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            if trained := [variable for gradient, variable in pairs if gradient is not None]:
                _make_slots(self._optimizer, trained)  # as apply_gradients does, too late for the comparison
            compares = compared_before_applied(gradients, variables, set(self._local), self._reduction, self)
        with compares:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

    def hvd_state(self, variables: Mapping[str, Any]) -> Iterator[Thing]:
        """The state that belongs to these variables, and the learning rate: variables, tensors or numbers.

        variables: by what they are called in words, which become the owners. What slots were computed with comes first.
        """
        inner = self._optimizer
        own = {id(one) for one in inner.variables()}  # in this graph
        for (name, _), one in getattr(inner, "_non_slot_dict", {}).items():  # the powers of Adam's betas
            if id(one) in own:
                yield OPTIMIZER, name, one
        rate = getattr(inner, "_learning_rate", getattr(inner, "_lr", None))
        is_of_a_function = tf.is_symbolic_tensor(rate) and tf.compat.v1.executing_eagerly_outside_functions()
        if rate is not None and not callable(rate) and not is_of_a_function:
            yield OPTIMIZER, "learning_rate", rate
        for name in inner.get_slot_names():
            slots = ((owner, inner.get_slot(variable, name)) for owner, variable in variables.items())
            yield from ((owner, name, slot) for owner, slot in slots if slot is not None)

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return reduced_but_local(gradients, variables, set(self._local), self._reduction, optimizer=self)


class _AdasumOptimizer(_Around):
    """Each rank takes its own step; Adasum combines the changes of the variables."""

    def hvd_state(self, _: Mapping[str, Any]) -> Iterator[Thing]:
        """Nothing: it is made of this rank's own gradients."""
        return iter(())

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """The user's optimizer's: nothing is reduced yet."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Applies the gradients, and then what all ranks have changed."""
        pairs = [pair for pair in grads_and_vars if pair[0] is not None]
        gradients, variables = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        _make_slots(self._optimizer, variables)

        def use(taken: list[Any]) -> Any:
            with compared_before(taken, variables, self._reduction, self):
                before = [tf.identity(one.read_value()) for one in variables]
            with tf.control_dependencies(before):
                stepped = self._optimizer.apply_gradients(
                    list(zip(taken, variables, strict=True)), global_step=global_step, name=name
                )
            with tf.control_dependencies([] if stepped is None else [stepped]):
                changes = [one.read_value() - old for one, old in zip(variables, before, strict=True)]
            combined = reduced(changes, variables, self._reduction, are_changes=True)
            return tf.group(
                *(one.assign(old + change) for one, old, change in zip(variables, before, combined, strict=True))
            )

        return self._after_passes(gradients, variables, use, global_step)


def _make_slots(optimizer: Any, variables: Sequence[Any]) -> None:
    """Before a branch in which they could not be made, so that they are initialized with all other variables."""
    with tf.init_scope():
        optimizer._create_slots(list(variables))
