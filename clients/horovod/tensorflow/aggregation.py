"""Gradients of several backward passes, summed up on this rank before they are reduced (backward_passes_per_step).

    pass 1 ... N-1    sums += gradients
    pass N            sums += gradients; reduce and use the sums; sums = 0

Works eagerly and in functions, whose variables live outside of them.

A variable of which no pass of a step makes a gradient has None and not zeros, with which an optimizer would change
it: by its momentum, or by weight decay. A function knows when it is traced which gradients it makes itself, but not
what another trace has made that runs an earlier pass of the step. So it looks, when it runs, whether there is any such
sum: it has a branch with these sums, and one where they are None. Where other functions have made gradients of some of
these variables in this step, and of others in earlier ones, the latter are zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from horovod.base.errors import TrainingCode, coded
from horovod.common.gradients import identity
from horovod.tensorflow.library import as_it_is

__all__ = ["LocalGradientAggregation"]


class LocalGradientAggregation:
    """The sums of one optimizer. average: divide them by the number of passes when they are used."""

    def __init__(self, passes: int, average: bool, sparse_as_dense: bool) -> None:
        self._passes = passes
        self._average = average
        self._sparse_as_dense = sparse_as_dense
        self._counter: Any = None  # counts passes since the sums were last used
        self._sums: dict[int, _Sum] = {}  # identity of a variable -> its sum

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        """Adds the gradients of a pass. Returns whether it was the last one before a step, a scalar bool."""
        dense = [self._as_dense(gradient) for gradient in gradients]
        self._make(dense, variables)
        added = [
            assigned
            for gradient, variable in zip(dense, variables, strict=True)
            if gradient is not None
            for assigned in self._sums[identity(variable)].add(gradient)
        ]
        with tf.control_dependencies([] if tf.executing_eagerly() else added):
            return tf.greater_equal(self._counter.assign_add(1), self._passes)

    def was_last(self) -> Any:
        """Whether the pass that was added last was the last one before a step, whose sums are taken; a scalar bool."""
        return tf.equal(self._counter, 0)

    def has_sum(self, variable: Any) -> bool:
        """Whether a pass of this step has made a gradient of it; in a function, whether one may."""
        known = self._sums.get(identity(variable))
        return known is not None and (not tf.executing_eagerly() or known.is_made())

    def take(self, variables: Sequence[Any], without: Collection[int] = ()) -> list[Any]:
        """Returns the sums of the gradients of `variables` (None for a variable without one) and resets them.

        The last pass need not have made a gradient of a variable of which an earlier one did. without: identities of
        variables that have none for certain.
        """
        in_graph = not tf.executing_eagerly()
        sums: list[_Sum | None] = []
        for variable in variables:
            known = None if identity(variable) in without else self._sums.get(identity(variable))
            sums.append(known if known is not None and (in_graph or known.is_made()) else None)
        taken = [None if one is None else self._of_passes(one.total.read_value()) for one in sums]
        with tf.control_dependencies([one for one in taken if one is not None] if in_graph else []):
            zeroed = [self._counter.assign(0), *(done for one in sums if one is not None for done in one.clear())]
        with tf.control_dependencies(zeroed if in_graph else []):  # v1 graphs run only what a result depends on
            return [None if one is None else tf.identity(one) for one in taken]

    def step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        use: Callable[[list[Any]], object],
        skip: Callable[[], object],
    ) -> None:
        """Adds the gradients of a pass; then uses the sums, or skips."""

        is_last = self.add(gradients, variables)
        unmade = self._perhaps_unmade(gradients, variables)

        def last(place: int = 0) -> tf.Tensor:
            if place == len(unmade):
                use(self.take(variables))
                return tf.constant(0)

            def without() -> tf.Tensor:
                use(self.take(variables, unmade[place]))
                return tf.constant(0)

            as_it_is(without)
            made = [self._sums[key].made.read_value() for key in unmade[place]]
            return tf.cond(tf.reduce_any(made), functools.partial(last, place + 1), without)

        def not_yet() -> tf.Tensor:
            skip()
            return tf.constant(0)

        as_it_is(last, not_yet)
        tf.cond(is_last, last, not_yet)

    def _perhaps_unmade(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[set[int]]:
        """In a function whose pass has no gradients of some variables: all of these, and, where they are others, those
        of which nothing has made a gradient yet.
        """
        if tf.executing_eagerly():
            return []
        keys = {
            identity(variable)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is None and identity(variable) in self._sums
        }
        never = {key for key in keys if not self._sums[key].is_used}
        return [one for one in ([keys, never] if never != keys else [keys]) if one]

    def _of_passes(self, total: Any) -> Any:
        return total / tf.constant(self._passes, total.dtype) if self._average else tf.identity(total)

    def _as_dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self._sparse_as_dense:
            raise ValueError(
                coded(
                    TrainingCode.SPARSE_GRADIENT,
                    "A gradient is tf.IndexedSlices, as embeddings have, and backward_passes_per_step > 1 sums up "
                    "dense gradients only. Pass sparse_as_dense=True to hvd.DistributedOptimizer.",
                )
            )
        return tf.convert_to_tensor(gradient)

    def _make(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        # A function makes variables in its first trace only, and another trace may have gradients of others.
        in_function = not tf.executing_eagerly() and tf.compat.v1.get_default_graph().building_function
        with tf.init_scope():
            if self._counter is None:
                self._counter = tf.Variable(0, trainable=False, name="hvd_passes")
            for gradient, variable in zip(gradients, variables, strict=True):
                total = self._sums.get(identity(variable))
                if total is None and (gradient is not None or in_function):
                    like = variable if gradient is None else gradient
                    total = self._sums[identity(variable)] = _Sum(variable, like, len(self._sums))
                if total is not None and in_function:
                    total.tell_functions()


class _Sum:
    """The sum of the gradients of a variable, which it keeps alive."""

    def __init__(self, variable: Any, like: Any, number: int) -> None:
        self.variable = variable
        self.total = tf.Variable(tf.zeros(like.shape, like.dtype), trainable=False, name=f"hvd_sum_{number}")
        # Whether there is any gradient in it since the last step: the first, once a function must know, else the second
        self.made: Any = None
        self._made_eagerly = False
        self.is_used = False  # whether a gradient was added, at least in the code that is being traced
        self._number = number

    def tell_functions(self) -> None:
        """A function is traced, that asks when it runs whether there is any gradient."""
        if self.made is None:
            self.made = tf.Variable(self._made_eagerly, trainable=False, name=f"hvd_made_{self._number}")

    def is_made(self) -> bool:
        """Asked eagerly."""
        return self._made_eagerly if self.made is None else bool(self.made.numpy())

    def add(self, gradient: Any) -> list[Any]:
        self.is_used = True
        return [self.total.assign_add(gradient), *self._set_made(True)]

    def clear(self) -> list[Any]:
        return [self.total.assign(tf.zeros_like(self.total)), *self._set_made(False)]

    def _set_made(self, made: bool) -> list[Any]:
        if self.made is not None:
            return [self.made.assign(made)]
        self._made_eagerly = made
        return []


as_it_is(
    LocalGradientAggregation.add,
    LocalGradientAggregation.take,
    LocalGradientAggregation.was_last,
    LocalGradientAggregation.step,
    _Sum.add,
    _Sum.clear,
    _Sum._set_made,
)
