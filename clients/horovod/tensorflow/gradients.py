"""Gradients of a step, reduced over the ranks: what hvd.DistributedGradientTape and DistributedOptimizer share.

In a function each gradient is an operation of its own, which starts when the gradient is there. Eagerly all of them are
there, so they are one operation. A gradient is known to the other ranks by its place and the last part of the name of
its variable: the whole name may differ, where one rank has made another model before. It serves to see that ranks have
the same order where a function reduces gradients of several models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from horovod.common.basics import Average
from horovod.common.gradients import Reduction, identity, name_of_group
from horovod.common.optimizer_numbers import Made
from horovod.tensorflow.library import as_it_is
from horovod.tensorflow.model_order import Owner, in_order
from horovod.tensorflow.ops import allreduce, grouped_allreduce, size_op
from horovod.tensorflow.same_weights import compared, compared_with_slots


def reduced(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    reduction: Reduction,
    generic_names: bool = False,
    optimizer: Any = None,
    made: Made | None = None,
    are_changes: bool = False,
) -> list[Any]:
    """The reduced gradients; None where there is none. optimizer: holds more that is compared (same_weights.py).

    made: of the optimizer, whose number ends names where TensorFlow executes eagerly. are_changes: not gradients, but
    what this rank has changed by a step of its own, so nothing is compared.
    """
    if not reduction.communicates():
        return list(gradients)
    owners = _owners(variables, generic_names)
    trained = {} if are_changes else _trained(owners, gradients, variables)
    called = made.called if made is not None and tf.executing_eagerly() else str
    with in_order(owners, reduction.process_set) as names, compared(trained, reduction.process_set, optimizer, made):
        return _reduced(gradients, variables, names, reduction, called)


def compared_before(
    gradients: Sequence[Any], variables: Sequence[Any], reduction: Reduction, optimizer: Any
) -> AbstractContextManager[None]:
    """Around a step of this rank's own, of which the changes are reduced: ranks compare before it."""
    if not reduction.communicates():
        return nullcontext()
    return compared(_trained(_owners(variables), gradients, variables), reduction.process_set, optimizer)


def compared_before_applied(
    gradients: Sequence[Any], variables: Sequence[Any], local: set[int], reduction: Reduction, optimizer: Any
) -> AbstractContextManager[None]:
    """Around what applies gradients in the graph of a session. local: identities of variables whose gradients stay."""
    if not reduction.communicates():
        return nullcontext()
    pairs = [pair for pair in zip(gradients, variables, strict=True) if identity(pair[1]) not in local]
    variables = [variable for _, variable in pairs]
    trained = _trained(_owners(variables), [gradient for gradient, _ in pairs], variables)
    return compared_with_slots(trained, reduction.process_set, optimizer)


def _owners(variables: Sequence[Any], generic_names: bool = False) -> list[Owner]:
    return [_owner(place, None if generic_names else variable) for place, variable in enumerate(variables)]


def _trained(owners: Sequence[Owner], gradients: Sequence[Any], variables: Sequence[Any]) -> dict[str, Any]:
    return {
        owner.name: variable
        for owner, variable, gradient in zip(owners, variables, gradients, strict=True)
        if gradient is not None
    }


def _reduced(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    names: Sequence[str],
    reduction: Reduction,
    called: Callable[[str], str],
) -> list[Any]:
    results = list(gradients)
    if reduction.sparse_as_dense:
        results = [_dense(gradient) for gradient in results]
    sparse = [place for place, gradient in enumerate(results) if isinstance(gradient, tf.IndexedSlices)]
    for place in sparse:
        # Gathered gradients are not summed on the way, so they are not divided before.
        results[place] = allreduce(
            results[place],
            device_sparse=reduction.device_sparse,
            compression=reduction.compression,
            op=reduction.op,
            name=called(names[place]),
            process_set=reduction.process_set,
            ignore_name_scope=True,
        )
    dense = [place for place, gradient in enumerate(results) if gradient is not None and place not in set(sparse)]
    for group in _groups(dense, variables, reduction):
        reduced_group = grouped_allreduce(
            [results[place] for place in group],
            device_dense=reduction.device_dense,
            compression=reduction.compression,
            op=reduction.op,
            prescale_factor=reduction.prescale,
            postscale_factor=reduction.postscale,
            process_set=reduction.process_set,
            ignore_name_scope=True,
            name=called(name_of_group([names[place] for place in group])),
        )
        for place, result in zip(group, reduced_group, strict=True):
            results[place] = result
    return results


def reduced_but_local(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    local: set[int],
    reduction: Reduction,
    generic_names: bool = False,
    optimizer: Any = None,
    made: Made | None = None,
) -> list[Any]:
    """The same, where gradients of the variables in `local` stay those of this rank.

    They are divided by the number of ranks (unless scale_local_gradients is off): losses are averaged over the ranks,
    and this rank's part of the average has this slope.
    """
    if not local:
        return reduced(gradients, variables, reduction, generic_names, optimizer, made)
    is_local = [identity(variable) in local for variable in variables]
    places = [place for place, stays in enumerate(is_local) if not stays]
    results = [
        _scaled(gradient, reduction) if is_local[place] else gradient for place, gradient in enumerate(gradients)
    ]
    travelled = reduced(
        [gradients[place] for place in places],
        [variables[place] for place in places],
        reduction,
        generic_names,
        optimizer,
        made,
    )
    for place, gradient in zip(places, travelled, strict=True):
        results[place] = gradient
    return results


def agreed(gradients: Sequence[Any], variables: Sequence[Any], local: set[int], reduction: Reduction) -> list[Any]:
    """The gradients, of which a local one is not finite anywhere if one of any rank is not.

    Loss scaling skips a step whose gradients are not finite, and all ranks must skip the same ones.
    """
    results = list(gradients)
    stay = [
        place
        for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
        if gradient is not None and identity(variable) in local
    ]
    if not local or not reduction.communicates():
        return results
    poison = tf.add_n([tf.reduce_sum(tf.cast(_dense(results[place]), tf.float32) * 0.0) for place in stay] or [0.0])
    poison = allreduce(
        poison, op=Average, name="gradients.finite", process_set=reduction.process_set, ignore_name_scope=True
    )
    for place in stay:
        gradient = results[place]
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values + tf.cast(poison, gradient.values.dtype)
            results[place] = tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        else:
            results[place] = gradient + tf.cast(poison, gradient.dtype)
    return results


def _groups(dense: Sequence[int], variables: Sequence[Any], reduction: Reduction) -> list[list[int]]:
    if not dense:
        return []
    if tf.executing_eagerly() and not reduction.groups:
        return [list(dense)]
    groups = reduction.grouped([variables[place] for place in dense])
    return [[dense[index] for index in group] for group in groups]


def _owner(place: int, variable: Any) -> Owner:
    path = str(getattr(variable, "path", None) or getattr(variable, "name", None) or "")
    leaf = path.rpartition("/")[2].partition(":")[0]
    if not leaf:
        return Owner(f"grad_{place}", "")
    handle = getattr(getattr(variable, "_value", variable), "handle", None)  # in a keras.Variable is a tf.Variable
    return Owner(f"gradient.{place}.{leaf}", path, int(getattr(handle, "_id", 0)))  # TensorFlow counts its tensors


def _dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def _scaled(gradient: Any, reduction: Reduction) -> Any:
    if gradient is None or not reduction.scale_local_gradients or not reduction.communicates():
        return gradient
    members = size_op(0 if reduction.process_set.process_set_id is None else reduction.process_set.process_set_id)
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(members, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(members, gradient.dtype)


as_it_is(reduced, reduced_but_local, agreed, compared_before)
