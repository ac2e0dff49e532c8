"""Each gradient is reduced once: neither never nor twice, by whatever way it comes to an optimizer.

    tape, compute_gradients, aggregate_gradients, allreduce   mark the tensors that they return
    the first three also note at the variables that gradients of them were handed out
    an optimizer                                              looks, reduces or not, and deletes the notes

A gradient that was changed in between (clipped, unscaled) is another tensor without a mark, hence the notes. They tell
that gradients are reduced where the script says so (skip_gradients_aggregation). Where it does not, a gradient without
a mark is reduced: with Average a second time changes nothing. With Sum it would, and that is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Average, Sum
from horovod.common.gradients import Reduction, identity
from horovod.common.process_sets import ProcessSet
from horovod.tensorflow.library import as_it_is

_MARK = "_hvd_reduced"
_NOTE = "_hvd_handed_out"


class Mark(NamedTuple):
    """Of a reduced tensor."""

    op: int
    process_set: ProcessSet
    owner: Any = None  # the Distribution of the optimizer that has reduced the gradient


class _Note(NamedTuple):
    """At a variable: gradients of it were handed out, in a graph, or eagerly."""

    mark: Mark
    graph: Any  # a weak reference, or None


def mark(tensors: Sequence[Any], op: int, process_set: ProcessSet, owner: Any = None) -> None:
    """These are results of a reduction. None among them is no tensor."""
    made = Mark(op, process_set, owner)
    for tensor in tensors:
        if tensor is not None:
            setattr(tensor, _MARK, made)


def hand_out(gradients: Sequence[Any], variables: Sequence[Any], reduction: Reduction, owner: Any = None) -> None:
    """The script gets reduced gradients of these variables."""
    mark(gradients, reduction.op, reduction.process_set, owner)
    graph = None if tf.executing_eagerly() else weakref.ref(tf.compat.v1.get_default_graph())
    note = _Note(Mark(reduction.op, reduction.process_set, owner), graph)
    for variable in variables:
        setattr(_native(variable), _NOTE, note)


def is_owned(gradients: Sequence[Any], owner: Any) -> bool:
    """Whether all of them are what the optimizer itself has reduced, for which nothing is left to do."""
    marks = [getattr(gradient, _MARK, None) for gradient in gradients if gradient is not None]
    return bool(marks) and all(one is not None and one.owner is owner for one in marks)


def are_reduced(
    gradients: Sequence[Any], variables: Sequence[Any], reduction: Reduction, local: Collection[int] = ()
) -> bool:
    """Whether an optimizer that is to reduce these gradients finds them reduced, and forgets the notes.

    local: identities of variables whose gradients stay and are divided by the number of ranks. Raises ValueError where
    a second reduction would change them and nothing tells whether it were one.
    """
    if not reduction.communicates():
        return False
    pairs = [(one, variable) for one, variable in zip(gradients, variables, strict=True) if one is not None]
    marks = [_mark_of(gradient, reduction) for gradient, _ in pairs]
    notes = [_note_of(variable, reduction) for _, variable in pairs]
    forget(variables)
    if reduction.op == Sum and any(one is not None and one.op != Sum for one in marks):
        raise ValueError(_twice("it is to sum up what was reduced with another op", variables))
    if pairs and all(one is not None for one in marks):
        return True
    divides = reduction.scale_local_gradients and any(identity(variable) in local for _, variable in pairs)
    if (reduction.op != Average or divides) and any(one is not None for one in (*marks, *notes)):
        raise ValueError(_twice("nothing tells whether all of these are made of reduced ones", variables))
    return False


def check_sums(gradients: Sequence[Any], variables: Sequence[Any], reduction: Reduction) -> None:
    """Raises ValueError where reduced gradients are to be summed up on this rank, and to be reduced again."""
    is_marked = any(one is not None and _mark_of(one, reduction) is not None for one in gradients)
    if reduction.op != Average and is_marked and reduction.communicates():
        raise ValueError(_twice("backward_passes_per_step is to reduce the sums of them", variables))


def check_reduced(gradients: Sequence[Any], variables: Sequence[Any], reduction: Reduction, advice: str) -> None:
    """Raises ValueError where nobody has reduced gradients that are applied as they are; forgets the notes.

    advice: what to do, a sentence.
    """
    if not reduction.communicates():
        return
    lacking = [
        variable
        for gradient, variable in zip(gradients, variables, strict=True)
        if gradient is not None and _mark_of(gradient, reduction) is None and _note_of(variable, reduction) is None
    ]
    forget(variables)
    if lacking:
        raise ValueError(
            coded(
                TrainingCode.NOT_REDUCED,
                f"The gradient of {_name(lacking[0])}{_others(len(lacking))} was to be applied as it is, but no call "
                f"of Horovod has reduced it: each rank would take a different step. {advice}",
            )
        )


def forget(variables: Sequence[Any]) -> None:
    """Gradients of these variables are applied. Notes of other functions stay: those may run again untraced."""
    graphs = list(_graphs())
    _forget_where(lambda note: note.graph is None or note.graph() in graphs, variables)


def forget_own(variables: Sequence[Any], owner: Any) -> None:
    """The optimizer makes new gradients of these variables; the script has dropped what it has handed out, or not."""
    _forget_where(lambda note: note.mark.owner is owner, variables)


def _forget_where(applies: Callable[[_Note], bool], variables: Sequence[Any]) -> None:
    for variable in variables:
        native = _native(variable)
        note = getattr(native, _NOTE, None)
        if note is not None and applies(note):
            delattr(native, _NOTE)


def _mark_of(gradient: Any, reduction: Reduction) -> Mark | None:
    made: Mark | None = getattr(gradient, _MARK, None)
    return made if made is not None and made.process_set is reduction.process_set else None


def _note_of(variable: Any, reduction: Reduction) -> _Note | None:
    note: _Note | None = getattr(_native(variable), _NOTE, None)
    if note is None or note.mark.process_set is not reduction.process_set:
        return None
    return note if note.graph is None or note.graph() is not None else None


def _graphs() -> Iterator[Any]:
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def _native(variable: Any) -> Any:
    """The tf.Variable in a keras.Variable."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value


def _twice(why: str, variables: Sequence[Any]) -> str:
    return coded(
        TrainingCode.REDUCED_TWICE,
        f"Gradients of {_name(variables[0])}{_others(len(variables))} were reduced before they came to a distributed "
        f"optimizer, and {why}: a second reduction would multiply or divide them by the number of ranks. Reduce either "
        "by a tape or by the optimizer. To an optimizer of tf_keras, say skip_gradients_aggregation=True when you "
        "apply gradients that are reduced and then changed.",
    )


def _name(variable: Any) -> str:
    return repr(str(getattr(variable, "path", None) or getattr(variable, "name", None) or "a variable"))


def _others(count: int) -> str:
    return "" if count == 1 else f" (and of {count - 1} others)"


as_it_is(mark, hand_out, is_owned, are_reduced, check_reduced, forget)
