"""Keras on JAX: a Backend (backends.py). Its trainers compile each step, so all of this is traced.

Variables have the values of the step while it is traced: Keras's trainer gives them in a StatelessScope.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horovod import jax as hvd
from horovod._keras import held
from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Sum
from horovod.common.gradients import Reduction, identity
from horovod.common.optimizer_numbers import Made
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.unreduced import Steps
from horovod.jax.overlap import allreduce_groups
from horovod.jax.plain_updates import stepped
from horovod.jax.same_weights import compared_in_step, is_traced

Compression = hvd.Compression
barrier = hvd.barrier
no_compression = Compression.none
compares_steps = False


def reduced_but_local(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    local: set[int],
    reduction: Reduction,
    optimizer: Any = None,
    made: Made | None = None,
) -> list[Any]:
    """The reduced gradients, None for a variable without one. Gradients of variables in `local` are not reduced."""
    if not reduction.communicates():
        return list(gradients)
    results, places = reduction.parted(gradients, variables, local)
    # In one call, unless groups are asked for: calls of a compiled function run one after another. The gradients of the
    # last layers, which a backward pass computes first, go first.
    groups = reduction.grouped([variables[place] for place in places]) if reduction.groups else [range(len(places))]
    # By place and the last part of the name, as on the other backends: the whole name may differ, where one rank has
    # made another model before.
    names = [f"gradient.{place}.{variable.name}" for place, variable in enumerate(variables)]
    called = str if made is None else made.called
    trained = {names[place]: variables[place] for place in places}
    with _compared(called(next(iter(trained), "")), trained, reduction.process_set, optimizer, made):
        return allreduce_groups(
            results,
            names,
            [[places[index] for index in group] for group in reversed(groups)],
            called,
            compression=reduction.compression,
            op=reduction.op,
            prescale_factor=reduction.prescale,
            postscale_factor=reduction.postscale,
            process_set=reduction.process_set,
        )


@contextmanager
def _compared(
    first: str, trained: Mapping[str, Any], process_set: ProcessSet, optimizer: Any, made: Made | None
) -> Iterator[None]:
    """Around the reduction of the gradients of these variables. first: of their names on the wire."""
    if is_traced():
        wire = f"allreduce.jit.{first}.same_weights"
        order = None if made is None else made.order()
        found = held.things(trained, optimizer, lambda variable: variable.value)
        with compared_in_step(wire, process_set, found, held.remedy, order):
            yield
        return
    counted = held.counted(
        f"allreduce.{first}.same_weights", trained, process_set, optimizer, lambda variable: variable.value, made
    )
    if counted is not None and counted.is_due():
        counted.compare()
    yield


def agreed(gradients: Sequence[Any], variables: Sequence[Any], local: set[int], reduction: Reduction) -> list[Any]:
    """The gradients, of which a local one is not finite anywhere if one of any rank is not."""
    results = list(gradients)
    if not local or not reduction.communicates():
        return results
    stay = [place for place, one in enumerate(variables) if identity(one) in local and gradients[place] is not None]
    own = sum((jnp.sum(results[place].astype("float32") * 0) for place in stay), jnp.zeros(()))
    poison = hvd.allreduce(own, process_set=reduction.process_set)
    for place in stay:
        results[place] = results[place] + poison.astype(results[place].dtype)
    return results


def applied(optimizer: Any, steps: Steps, gradients: Sequence[Any]) -> None:
    """Traced, where the script compiles its steps."""
    stepped(steps, gradients)


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> object:
    values = hvd.broadcast_parameters([variable.value for variable in variables], root_rank, process_set)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return values


class Aggregation:
    """Refuses what would keep sums beside the variables of which the trainer's compiled step knows."""

    def __init__(self, passes: int, average: bool, sparse_as_dense: bool) -> None:
        raise NotImplementedError(
            coded(
                TrainingCode.INVALID_ARGUMENT,
                "backward_passes_per_step is not supported if Keras runs on JAX. Pass "
                f"gradient_accumulation_steps={passes} to the optimizer instead.",
            )
        )


def allreduce(value: Any, name: str | None, op: int, prescale: float, postscale: float, compression: Any) -> Any:
    return hvd.allreduce(
        _array(value), name=name, op=op, prescale_factor=prescale, postscale_factor=postscale, compression=compression
    )


def differentiable_sum(value: jax.Array, name: str) -> Any:
    return hvd.allreduce(value, name=name, op=Sum)


def allgather(value: Any, name: str | None) -> Any:
    return hvd.allgather(_array(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None) -> Any:
    return hvd.broadcast(_array(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None, op: int) -> Any:
    return hvd.reducescatter(_array(value), name=name, op=op)


def _array(value: Any) -> Any:
    value = getattr(value, "value", value)  # of a keras.Variable
    # NumPy's travel in 64 bits. Lists are arrays here, and not trees.
    return value if isinstance(value, jax.Array | np.ndarray | np.generic) else jnp.asarray(value)
