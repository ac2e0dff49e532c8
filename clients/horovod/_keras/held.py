"""What a training of Keras or TensorFlow holds, for comparisons over the ranks: variables, state, learning rate.

Ranks may know a variable by different paths, because one has made another model before. So a variable is named by its
place among those that are trained and the last part of its path, and state by the variable that it belongs to. Not
compared: variables that are not trained (statistics of batches, seeds of dropout, metrics), and those whose gradients
stay on their rank, with their state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from horovod.common.counted_weights import CountedWeights, Thing, of_model
from horovod.common.gradients import identity
from horovod.common.optimizer_numbers import Made, Order
from horovod.common.process_sets import ProcessSet
from horovod.common.same_weights import Kind

OPTIMIZER: Final = "the optimizer"  # an owner
# Of the optimizer's own numbers. Others count steps, and a function may count before or after they are read.
_NUMBERS: Final = frozenset({"learning_rate", "dynamic_scale"})


def counted(
    wire: str,
    trained: Mapping[str, Any],
    process_set: ProcessSet,
    optimizer: Any,
    values: Callable[[Any], Any],
    made: Made | None = None,
    order: Callable[[], Order] | None = None,
) -> CountedWeights | None:
    """The comparison for a step in which these are trained; None if there is no variable among them.

    wire: name of the comparison. trained: by the names of their gradients. optimizer: of Keras, or of
    tf.compat.v1.train (which has `hvd_state`), or None. values: of a variable, as an array. made: of the optimizer.
    order: else, makes what says which model is meant.
    """
    variables = _trainable(trained)
    if not variables:
        return None
    anchor = next(iter(variables.values()))

    def make() -> CountedWeights:
        return CountedWeights(wire, _Things(variables, optimizer, values), process_set, remedy, made)

    found = of_model(getattr(anchor, "_value", anchor), (wire, process_set.process_set_id), make)
    if not found.things.are_of(variables, optimizer):
        found.compare_others(_Things(variables, optimizer, values), made)
    if made is not None:
        found.order = made
    elif order is not None and (found.order is None or isinstance(found.order, Made)):
        found.order = order()  # a model that is trained at another line, or traced again there, stays the same
    return found


def things(trained: Mapping[str, Any], optimizer: Any, values: Callable[[Any], Any]) -> list[Thing]:
    """What such a comparison compares."""
    return list(_Things(_trainable(trained), optimizer, values)())


def _trainable(trained: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in trained.items() if getattr(one, "trainable", False)}


def note_differences(optimizer: Any, variables: Mapping[int, Any]) -> None:
    """These variables differ between ranks by intent. By identity."""
    if (distribution := _distribution_of(optimizer)) is not None:
        distribution.differ.update(variables)


def owner(place: int, name: str) -> str:
    """How a variable is called in words; place: among those that are trained. name: of its gradient."""
    return f"variable {place} ({name.rpartition('.')[2]!r})"


class _Things:
    """What ranks compare of a model and its optimizer, both of which it refers to weakly."""

    def __init__(self, variables: Mapping[str, Any], optimizer: Any, values: Callable[[Any], Any]) -> None:
        self._variables = {name: weakref.ref(one) for name, one in variables.items()}
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._values = values

    def are_of(self, variables: Mapping[str, Any], optimizer: Any) -> bool:
        own = None if self._optimizer is None else self._optimizer()
        return own is optimizer and self._variables.keys() == variables.keys()

    def __call__(self) -> Iterator[Thing]:
        owners: dict[int, str] = {}
        optimizer = None if self._optimizer is None else self._optimizer()
        distribution = _distribution_of(optimizer)
        by_intent = getattr(distribution, "differ", {})
        known = [*getattr(distribution, "local", {}).values()]
        compared = []
        for place, (name, reference) in enumerate(self._variables.items()):
            variable = reference()
            if variable is None:
                continue
            known.append(variable)
            if identity(variable) not in by_intent:
                owners[identity(variable)] = called = owner(place, name)
                compared.append((called, variable))
        if optimizer is not None:  # first, because variables differ after a step in which one of these did
            if hasattr(optimizer, "hvd_state"):
                for called, name, one in optimizer.hvd_state(dict(compared)):
                    yield called, name, self._values(one)
            else:
                yield from self._state(optimizer, known, owners)
        for called, variable in compared:
            yield called, "", self._values(variable)

    def _state(self, optimizer: Any, known: list[Any], owners: Mapping[int, str]) -> Iterator[Thing]:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        found = optimizer.variables
        state = list(found() if callable(found) else found)
        rate = getattr(inner, "learning_rate", None)
        if hasattr(rate, "assign") and identity(rate) not in {identity(one) for one in state}:
            state.append(rate)
        # Keras 3 knows all, also those that are not trained now.
        variables = {_words(one): one for one in [*getattr(inner, "_trainable_variables", ()), *known]}
        longest_first = sorted(variables, key=len, reverse=True)  # dense_1_kernel before kernel
        # Adafactor has arrays whose names don't say of which variable. If some variables are not compared, it may be
        # theirs.
        numbers: dict[str, int] = {}
        for one in state:
            words = _words(one)
            of_variable = next((words_of for words_of in longest_first if words_of in words), None)
            if of_variable is None:
                leaf = _path(one).rpartition("/")[2]
                if leaf in _NUMBERS or (one.shape and len(owners) == len(variables)):
                    numbers[leaf] = number = numbers.get(leaf, 0) + 1
                    yield OPTIMIZER, leaf if number == 1 else f"{leaf} {number}", self._values(one)
            elif (called := owners.get(identity(variables[of_variable]))) is not None:
                # Keras 3 has adam_1/dense_kernel_momentum, tf_keras m/dense/kernel. Ranks may count other optimizers.
                before, _, after = words.partition(of_variable)
                yield called, after.strip("_") or before.rpartition("_")[2], self._values(one)


def _distribution_of(optimizer: Any) -> Any:
    while optimizer is not None and getattr(optimizer, "_hvd", None) is None:
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return getattr(optimizer, "_hvd", None)


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or "").partition(":")[0]


def _words(variable: Any) -> str:
    return f"_{_path(variable).replace('/', '_')}_"


def remedy(_: set[Kind]) -> str:
    return (
        "Broadcast them from rank 0 before the first step and after a checkpoint was loaded: "
        "model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]), or in a loop of your own "
        "hvd.broadcast_variables(model.variables, root_rank=0), and then the variables of the optimizer."
    )
