"""What a trainer or an optimizer of MXNet holds, compared over the ranks (common/counted_weights.py).

Parameters that are trained, their state and the learning rate. Ranks may know a parameter by different names, because
one has made another model before, so it is named by its place and the last part of its name.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from horovod.common.counted_weights import CountedWeights, Thing, of_model
from horovod.common.optimizer_numbers import Made
from horovod.common.process_sets import ProcessSet
from horovod.common.same_weights import Kind
from horovod.mxnet.errors import mxnet_errors


@mxnet_errors
def compare_trainer(trainer: Any, first: str, process_set: ProcessSet, made: Made) -> None:
    """Before the gradients of a step are reduced. first: name of one of them. made: of the trainer.

    ValueError, on all ranks: they differ, and the setting says that this is an error.
    """
    reference = weakref.ref(trainer)

    def things() -> Iterator[Thing]:
        owner = reference()
        return iter(()) if owner is None else _of_trainer(owner)

    wire = f"allreduce.{made.called(first)}.same_weights"
    counted = of_model(trainer, wire, lambda: CountedWeights(wire, things, process_set, _remedy, made))
    if counted.is_due():
        counted.compare()


@mxnet_errors
def compare_updated(
    optimizer: Any,
    indices: Sequence[Any],
    weights: Sequence[Any],
    states: Sequence[Any],
    process_set: ProcessSet,
    made: Made,
) -> None:
    """The same for an optimizer that is told of one parameter after the other.

    It notes them in the first step, and compares all of them when the first one comes again.
    """
    reference = weakref.ref(optimizer)
    wire = f"allreduce.{made.called(f'gradient.{indices[0]}')}.same_weights"

    def make() -> CountedWeights:
        return CountedWeights(wire, _Updated(reference), process_set, _remedy, made)

    counted = of_model(optimizer, (process_set.process_set_id, made.called("")), make)
    counted.things.note(indices, weights, states)
    if counted.wire == wire and counted.is_due():
        counted.compare()


class _Updated:
    """The parameters that an optimizer has updated."""

    def __init__(self, optimizer: weakref.ref[Any]) -> None:
        self._optimizer = optimizer
        self._known: dict[Any, tuple[Any, Any]] = {}

    def note(self, indices: Sequence[Any], weights: Sequence[Any], states: Sequence[Any]) -> None:
        self._known.update(zip(indices, zip(weights, states, strict=True), strict=True))

    def __call__(self) -> Iterator[Thing]:
        yield from _rate_of(self._optimizer())
        for index, (weight, state) in self._known.items():
            owner = f"parameter {index}"
            yield from _state(owner, state)
            if weight.stype == "default":
                yield owner, "", weight.asnumpy()


def _of_trainer(trainer: Any) -> Iterator[Thing]:
    yield from _rate_of(trainer._optimizer)
    states = trainer._updaters[0].states if trainer._updaters else {}
    for place, parameter in enumerate(trainer._params):
        if parameter.grad_req == "null" or parameter._stype != "default":
            continue
        owner = f"parameter {place} ({parameter.name.rpartition('_')[2]!r})"
        yield from _state(owner, states.get(place))
        yield owner, "", parameter.data(parameter.list_ctx()[0]).asnumpy()


def _rate_of(optimizer: Any) -> Iterator[Thing]:
    """First, because weights differ after a step in which it did."""
    if optimizer is not None:
        yield "the optimizer", "learning_rate", float(optimizer.learning_rate)


def _state(owner: str, state: Any) -> Iterator[Thing]:
    for place, one in enumerate(state if isinstance(state, list | tuple) else [state]):
        if isinstance(one, list | tuple):
            yield from _state(owner, one)
        elif getattr(one, "stype", None) == "default":
            yield owner, f"state {place}", one.asnumpy()


def _remedy(kinds: set[Kind]) -> str:
    state = " Load the optimizer's state on all ranks alike." if Kind.STATE in kinds else ""
    return (
        "Call hvd.broadcast_parameters(model.collect_params(), root_rank=0) on all ranks before the first step and "
        f"after a checkpoint was loaded.{state}"
    )
