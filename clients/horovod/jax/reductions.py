"""hvd.allreduce, hvd.reducescatter and their grouped forms.

    result = postscale_factor * REDUCE(prescale_factor * tensor)      element by element over the ranks

REDUCE is `op`: Average (the default; the sum divided by the number of ranks), Sum, Min, Max or Product. For integers
each multiplication by a factor is done in double precision and truncated toward zero, and Sum wraps around.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from horovod._core import OpType
from horovod.common.basics import Adasum, Average
from horovod.common.ops.compression import compressed_group
from horovod.common.ops.specs import reduce_op
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.jax.arrays import COLLECTIVES, as_array
from horovod.jax.compression import Compression, Compressor
from horovod.jax.primitive import Call, run
from horovod.jax.trees import Run, of_each, of_list, of_tree

__all__ = ["allreduce", "grouped_allreduce", "grouped_reducescatter", "reducescatter"]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The reduction of `tensor` over all ranks, as a new array of the same shape and dtype. Differentiable.

    Of a pytree of arrays, as jax.lax.pmean takes it, it is the tree of the reductions, which travel as one group.

    Every rank of `process_set` must call it with the same shape, dtype and op. Its gradient is the same allreduce of
    the gradient. Example, on ranks 0 and 1:

        >>> hvd.allreduce(jnp.array([1.0, hvd.rank()]))
        Array([1. , 0.5], dtype=float32)
        >>> hvd.allreduce({"loss": jnp.array(float(hvd.rank())), "rows": [jnp.array(8.0)]})
        {'loss': Array(0.5, dtype=float32), 'rows': [Array(8., dtype=float32)]}
    """
    op = reduce_op(op, average)
    options = {"prescale": float(prescale_factor), "postscale": float(postscale_factor), "process_set": process_set}
    each_alone = of_each if op == Adasum else of_tree  # in a group the lengths of all arrays would count together
    return each_alone(tensor, "allreduce", name, _reduction(OpType.ALLREDUCE, compression, op, options))


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[jax.Array]:
    """`allreduce` of several arrays as one operation: none is reduced before all are ready on all ranks.

    Returns a list of new arrays in the order given. Differentiable. Example, on ranks 0 and 1:

        >>> hvd.grouped_allreduce([jnp.ones(2), jnp.array(hvd.rank())], op=hvd.Sum)
        [Array([2., 2.], dtype=float32), Array(1, dtype=int32)]
    """
    options = {"prescale": float(prescale_factor), "postscale": float(postscale_factor), "process_set": process_set}
    reduce = _reduction(OpType.ALLREDUCE, compression, reduce_op(op, average), options)
    return of_list(tensors, "grouped_allreduce", name, lambda arrays: reduce(arrays, True, name, None))


def allreduce_of(
    content: str,
    tensors: Sequence[Any],
    asynchronous: bool,
    compression: type[Compressor],
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> list[jax.Array]:
    """`grouped_allreduce` of tensors that `content` names. Ranks whose names differ never reduce with each other.

    asynchronous: a compiled function goes on meanwhile with what needs no result of it.
    """
    options = {
        "prescale": float(prescale_factor),
        "postscale": float(postscale_factor),
        "process_set": process_set,
        "asynchronous": asynchronous,
    }
    arrays = [as_array(tensor, "grouped_allreduce", None) for tensor in tensors]
    return list(_reduction(OpType.ALLREDUCE, compression, op, options)(arrays, True, None, content))


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """The reduction of `tensor` over all ranks, of which each rank gets its share of the rows. Differentiable.

    Of a pytree of arrays, it is the tree of each array's share.

    Rows are shared out evenly. If they can't be, the first ranks get one row more. The gradient is the allgather of
    the gradient, times the factors, and for Sum times the number of ranks. Example, on rank 0 of two:

        >>> hvd.reducescatter(jnp.array([1.0, 2.0, 3.0]), op=hvd.Sum)
        Array([2., 4.], dtype=float32)
    """
    options = {"prescale": float(prescale_factor), "postscale": float(postscale_factor), "process_set": process_set}
    return of_tree(tensor, "reducescatter", name, _reduction(OpType.REDUCESCATTER, compression, op, options))


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[jax.Array]:
    """`reducescatter` of several arrays as one operation; a list of new arrays in the order given. Differentiable.

    Example, on rank 0 of two:

        >>> hvd.grouped_reducescatter([jnp.ones(2), jnp.ones((4, 1))], op=hvd.Sum)
        [Array([2.], dtype=float32), Array([[2.], [2.]], dtype=float32)]
    """
    options = {"prescale": float(prescale_factor), "postscale": float(postscale_factor), "process_set": process_set}
    reduce = _reduction(OpType.REDUCESCATTER, compression, op, options)
    return of_list(tensors, "grouped_reducescatter", name, lambda arrays: reduce(arrays, True, name, None))


def _reduction(kind: OpType, compression: type[Compressor], op: int, options: dict[str, Any]) -> Run:
    """Reduces arrays, as horovod.jax.trees calls it. options: fields of Call."""

    def run_compressed(arrays: list[jax.Array], grouped: bool, name: str | None, content: str | None) -> list[Any]:
        call = Call(kind, name, op=op, grouped=grouped, content=content, **options)
        check = COLLECTIVES.reduction if kind is OpType.ALLREDUCE else COLLECTIVES.scattered_reduction

        def reduce(travelling: list[Any]) -> list[jax.Array]:
            for array in travelling:
                check(array, op, call.prescale, call.postscale, call.process_set)
            return run(call, *travelling)

        return compressed_group(compression, arrays, reduce)

    return run_compressed
