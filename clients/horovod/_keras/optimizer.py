"""What makes a Keras optimizer a distributed one: it reduces gradients over the ranks before it applies them.

The user's optimizer becomes an instance of a subclass made on the fly (docs/adr/0051): so it keeps what get_config
would lose, and its state. The subclass has its base's names, so saved files load without Horovod. Its methods are those
of keras3.py or adapters/tf_keras.py, and work on the `Distribution` that the optimizer has in `_hvd`.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from horovod.base.errors import OperationCode, TrainingCode, coded
from horovod.common.basics import Average, Sum
from horovod.common.gradients import Reduction, check_passes, identity
from horovod.common.optimizer_numbers import Made


class Distribution:
    """What a distributed optimizer has beside what its own class has."""

    def __init__(
        self, reduction: Reduction, passes: int, average: bool, backend: Any, made: Made | None = None
    ) -> None:
        """made: of the optimizer that is a copy of another one."""
        check_passes(passes)
        if reduction.op not in (Average, Sum):
            raise ValueError(
                coded(
                    OperationCode.UNDEFINED_REDUCTION, "A Keras optimizer supports op=hvd.Average and op=hvd.Sum only."
                )
            )
        if reduction.compression is None:
            reduction = replace(reduction, compression=backend.no_compression)
        self.reduction = reduction
        self.made = made or Made(["gradient"], reduction.process_set, late=True)
        self.backend = backend
        self.passes = passes
        self.average = average
        self.local: dict[int, Any] = {}  # variables by identity, whose gradients stay
        self.differ: dict[int, Any] = {}  # others that a callback does not broadcast
        self.aggregation = backend.Aggregation(passes, average, reduction.sparse_as_dense) if passes > 1 else None
        self.applies = False  # gradients that are reduced
        self.defers = False  # its optimizer gives out gradients that somebody else brings back to be reduced

    def register_local_var(self, variable: Any) -> None:
        self.local[identity(variable)] = variable

    def __deepcopy__(self, memo: dict[int, Any]) -> Distribution:
        """Of an optimizer that Keras 2 copies with all that it has."""
        groups = copy.deepcopy(self.reduction.groups, memo)
        reduction = replace(self.reduction, groups=groups)
        twin = Distribution(reduction, self.passes, self.average, self.backend, copy.copy(self.made))
        for variable in copy.deepcopy(list(self.local.values()), memo):
            twin.register_local_var(variable)
        return twin

    def reduce(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], loss_scaled: bool
    ) -> list[Any]:
        """The gradients, reduced over the ranks.

        optimizer: the one that will apply them. loss_scaled: a LossScaleOptimizer applies them, which skips a step with
        infinite gradients.
        """
        local = set(self.local)
        with self.made.step(alone=self.backend.compares_steps):
            results: list[Any] = self.backend.reduced_but_local(
                gradients, variables, local, self.reduction, optimizer, self.made
            )
        return self.backend.agreed(results, variables, local, self.reduction) if loss_scaled else results

    def apply(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        apply: Callable[..., object],
        loss_scaled: bool,
    ) -> None:
        """Gives `apply` reduced gradients, when there are `passes` of them. `optimizer` is whose `apply` it is."""
        given = list(gradients)
        if self.applies or not given:
            apply(given, trainable_variables=variables)
            return
        known = list(optimizer._trainable_variables if variables is None else variables)
        asked = {identity(variable) for variable in known}
        given, known = _among_all(optimizer, given, known)

        def use(taken: list[Any]) -> None:
            reduced = self.reduce(optimizer, taken, known, loss_scaled)
            with self.done():
                if len(known) == len(asked):
                    apply(reduced, trainable_variables=variables)
                    return
                # A variable of earlier passes has a sum, though this call has no gradient of it.
                pairs = [
                    (gradient, variable)
                    for gradient, variable in zip(reduced, known, strict=True)
                    if gradient is not None or identity(variable) in asked
                ]
                apply([pair[0] for pair in pairs], trainable_variables=[pair[1] for pair in pairs])

        if self.aggregation is None:
            use(given)
            return
        if not optimizer.built:
            optimizer.build(known)
            optimizer.built = True
        self.aggregation.step(given, known, use, lambda: optimizer.iterations.assign_add(1))

    def stateless_apply(
        self,
        optimizer: Any,
        state: Sequence[Any],
        gradients: Sequence[Any],
        values: Sequence[Any],
        apply: Callable[[list[Any]], Any],
        loss_scaled: bool,
    ) -> Any:
        """What `apply` makes of reduced gradients. `optimizer` is whose `stateless_apply` it is; state: values of its
        variables; values: of the model's.

        Where gradients of several passes are summed, it is given them as they are: the optimizer's `apply` comes later.
        """
        given = list(gradients)
        if self.applies or not given or self.aggregation is not None:
            return apply(given)
        from keras import StatelessScope

        known = list(optimizer._trainable_variables)
        found = [*zip(known, values, strict=True), *zip(optimizer.variables, state, strict=False)]
        with StatelessScope(state_mapping=found):  # they may have no values of their own
            reduced = self.reduce(optimizer, given, known, loss_scaled)
        with self.done():
            return apply(reduced)

    @contextmanager
    def done(self) -> Iterator[None]:
        """While gradients are applied that are reduced, also by an optimizer around this one."""
        before, self.applies = self.applies, True
        try:
            yield
        finally:
            self.applies = before

    def check_update(self, variable: Any) -> None:
        """Raises ValueError where one variable is updated past `apply`, with a gradient that is this rank's own."""
        if not self.applies and self.reduction.communicates():
            name = getattr(variable, "path", None) or getattr(variable, "name", None) or "a variable"
            raise ValueError(
                coded(
                    TrainingCode.NOT_REDUCED,
                    f"update_step() of a distributed optimizer was called for {str(name)!r}. It reduces no gradient: "
                    "each rank would take a different step. Call apply() or apply_gradients() with all gradients.",
                )
            )


def _among_all(optimizer: Any, gradients: list[Any], variables: list[Any]) -> tuple[list[Any], list[Any]]:
    """The same for all variables of the optimizer, in its order, where a script left out those without a gradient.

    Ranks know a gradient by its place: where they leave out different variables, the places among the rest are the same
    for different ones.
    """
    every = list(getattr(optimizer, "_trainable_variables", ())) if optimizer.built else []
    by_variable = {identity(variable): gradient for gradient, variable in zip(gradients, variables, strict=True)}
    if len(by_variable) == len(every) or not by_variable.keys() <= {identity(variable) for variable in every}:
        return gradients, variables
    return [by_variable.get(identity(variable)) for variable in every], every


def distribution_of(optimizer: Any) -> Distribution:
    """ValueError where it has none: it was made from the configuration of a distributed one."""
    if optimizer._hvd is None:
        raise ValueError(
            coded(
                TrainingCode.NOT_DISTRIBUTED,
                f"This {type(optimizer).__name__} was made from the configuration of a distributed optimizer and is "
                "not distributed itself. Pass it to hvd.DistributedOptimizer.",
            )
        )
    distribution: Distribution = optimizer._hvd
    return distribution


def is_distributed(optimizer: Any) -> bool:
    """Whether it reduces gradients, or an optimizer in it does."""
    return distribution_in(optimizer) is not None


def distribution_in(optimizer: Any) -> Distribution | None:
    while optimizer is not None:
        distribution: Distribution | None = getattr(optimizer, "_hvd", None)
        if distribution is not None:
            return distribution
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None


def distribute(optimizer: Any, distribution: Distribution, mixin: type, name: str | None) -> Any:
    """Makes `optimizer` a distributed one and returns it."""
    if is_distributed(optimizer):
        warnings.warn(
            "hvd.DistributedOptimizer was given an optimizer that is distributed already; it is returned unchanged. "
            "Wrapping twice would reduce every gradient twice.",
            stacklevel=3,
        )
        return optimizer
    base: Any = type(optimizer)
    optimizer.__class__ = _class_of(base, mixin)
    optimizer.__dict__["_hvd"] = distribution  # past Keras, which would look for variables in it
    # Libraries look for "horovod" in an optimizer's module. It is set on the object and not in the class: files name
    # the class's module, and are to load without Horovod.
    optimizer.__dict__["__module__"] = __name__
    if name is not None:
        optimizer.__dict__["name"] = name
    return optimizer


@functools.cache
def _class_of(base: type, mixin: type) -> type:
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (mixin, base), names)
