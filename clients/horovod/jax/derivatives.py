"""The collectives under jax.grad, jax.jvp and jax.vmap: rules of the primitive.

Forward mode calls the same collective on the tangents. Reverse mode turns that round, into what the other frameworks'
gradients are: Horovod averages losses, so these differ from the exact transposes by factors.

    forward            backward, of the gradient g of the result
    allreduce          the same allreduce of g
    allgather          the average of g over the ranks, cut to this rank's rows
    broadcast          the average of g over the ranks on the root, zeros elsewhere
    alltoall           g's rows go back to where they came from
    reducescatter      the allgather of g, with its factors; for Sum times the number of ranks

In jax.vmap the arrays of all elements travel in one call. Where rows are sent, the mapped dimension becomes one of the
rows' own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching

from horovod._core import OpType
from horovod.base.errors import OperationCode, coded
from horovod.common.basics import Adasum, Average
from horovod.common.ops.specs import scatter_gradient_factor
from horovod.jax.arrays import COLLECTIVES
from horovod.jax.devices import in_host_memory
from horovod.jax.primitive import Call, collective_p, member, run
from horovod.worker.runtime.context import current


# -- forward mode ------------------------------------------------------------------------------------------------------
def _jvp(primals: Any, tangents: Any, *, call: Call) -> Any:
    results = run(call, *primals)
    zeros = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    # All that can have a tangent take part, so that ranks agree whatever is constant on one of them.
    places = [place for place, one in enumerate(primals) if jnp.issubdtype(one.dtype, jnp.inexact)]
    if not places or all(type(tangents[place]) is ad.Zero for place in places):
        return results, zeros
    known = _known(call, primals, results) if not any(map(_is_traced, primals)) else call
    rows = None if known.rows is None else tuple(known.rows[place] for place in places)
    moving = [ad.instantiate_zeros(tangents[place]) for place in places]
    for place, tangent in zip(places, run(replace(known, rows=rows, tangent=True), *moving), strict=True):
        zeros[place] = tangent
    return results, zeros


def _is_traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def _known(call: Call, primals: Any, results: Any) -> Call:
    """With what only a call outside of compiled functions knows of the other ranks."""
    if call.kind is OpType.ALLGATHER:
        name = None if call.name is None else f"{call.name}.rows"
        mine = in_host_memory(np.array([[primal.shape[0] for primal in primals]], np.int32))
        counts = COLLECTIVES.allgather(mine, name, call.process_set)
        return replace(call, rows=tuple(map(tuple, counts.T.tolist())))
    if call.kind is OpType.ALLTOALL and call.splits is not None and call.received is None:
        return replace(call, received=tuple(results[1].tolist()))
    return call


# -- reverse mode ------------------------------------------------------------------------------------------------------
def _transposed(gradients: Any, *tangents: Any, call: Call) -> Any:
    given = [ad.instantiate_zeros(gradient) for gradient in gradients]
    if call.kind is OpType.ALLREDUCE:
        return run(call.of_gradient(), *given)
    if call.kind is OpType.ALLTOALL:
        return run(call.of_gradient(splits=call.received, received=call.splits), *given)
    if call.kind is OpType.REDUCESCATTER:
        return _of_reducescatter(given, tangents, call)
    averages = run(
        call.of_gradient(kind=OpType.ALLREDUCE, op=Average, prescale=1.0, postscale=1.0, root=0, rows=None), *given
    )
    if call.kind is OpType.BROADCAST:
        return averages if current().world.rank == call.root else [jnp.zeros_like(one) for one in averages]
    place = member(call.process_set)
    own = []
    for index, (average, tangent) in enumerate(zip(averages, tangents, strict=True)):
        rows = tangent.aval.shape[0]
        first = rows * place if call.rows is None else sum(call.rows[index][:place])
        own.append(jax.lax.slice_in_dim(average, first, first + rows))
    return own


def _of_reducescatter(gradients: list[Any], tangents: Any, call: Call) -> Any:
    factor = scatter_gradient_factor(call.op, call.prescale, call.postscale, call.process_set)
    size = current().world.size if call.process_set.ranks is None else len(call.process_set.ranks)
    counts = [
        [tangent.aval.shape[0] // size + (one < tangent.aval.shape[0] % size) for one in range(size)]
        for tangent in tangents
    ]
    gather = call.of_gradient(kind=OpType.ALLGATHER, prescale=1.0, postscale=1.0, rows=tuple(map(tuple, counts)))
    return run(gather, *(gradient * jnp.asarray(factor, gradient.dtype) for gradient in gradients))


# -- vmap --------------------------------------------------------------------------------------------------------------
def _batched(tensors: Any, dimensions: Any, *, call: Call) -> Any:
    if call.op == Adasum:
        raise NotImplementedError(
            coded(
                OperationCode.NOT_COMPILABLE,
                "op=hvd.Adasum is not the same for several arrays together, as jax.vmap needs. Use jax.lax.map.",
            )
        )
    sends_rows = call.kind not in (OpType.ALLREDUCE, OpType.BROADCAST)
    if sends_rows and any(tensor.ndim < 2 for tensor, one in zip(tensors, dimensions, strict=True) if one is not None):
        raise ValueError(
            coded(OperationCode.NO_ROWS, f"{call.operation}: an array of jax.vmap's is a scalar, which has no rows.")
        )
    moved = [
        tensor if dimension is None else jnp.moveaxis(tensor, dimension, int(sends_rows))
        for tensor, dimension in zip(tensors, dimensions, strict=True)
    ]
    results = run(call, *moved)
    # None: the argument is the same for all elements.
    mapped = [None if one is None else int(sends_rows) for one in dimensions]
    return results, mapped + [None] * (len(results) - len(mapped))


ad.primitive_jvps[collective_p] = _jvp
ad.primitive_transposes[collective_p] = _transposed
batching.primitive_batchers[collective_p] = _batched
