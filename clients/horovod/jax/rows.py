"""hvd.allgather, its grouped form, hvd.broadcast and hvd.alltoall: what moves arrays without arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from horovod._core import OpType
from horovod.base.errors import OperationCode, coded
from horovod.common.ops.collectives import check_root
from horovod.common.ops.specs import set_number
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.jax.arrays import as_array, like_given
from horovod.jax.primitive import Call, run
from horovod.jax.trees import of_each, of_list, of_tree

__all__ = ["allgather", "alltoall", "broadcast", "grouped_allgather"]


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """The concatenation of every rank's `tensor` along the first dimension, in rank order. Differentiable.

    Of a pytree of arrays, it is the tree of the concatenations, which travel as one group.

    The gradient is the average over the ranks of the result's gradient, cut to this rank's rows. Example, on ranks 0
    and 1:

        >>> hvd.allgather(jnp.full((hvd.rank() + 1, 2), hvd.rank()))
        Array([[0, 0],
               [1, 1],
               [1, 1]], dtype=int32)
    """
    set_number(process_set, "Allgather")

    def gather(arrays: list[jax.Array], grouped: bool, name: str | None, content: str | None) -> list[jax.Array]:
        return run(Call(OpType.ALLGATHER, name, process_set, grouped=grouped, content=content), *arrays)

    return of_tree(tensor, "allgather", name, gather)


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[jax.Array]:
    """`allgather` of several arrays as one operation; a list of new arrays in the order given. Differentiable.

    Example, on ranks 0 and 1:

        >>> hvd.grouped_allgather([jnp.array([hvd.rank()]), jnp.ones(hvd.rank())])
        [Array([0, 1], dtype=int32), Array([1.], dtype=float32)]
    """
    set_number(process_set, "Allgather")
    call = Call(OpType.ALLGATHER, name, process_set, grouped=True)
    return of_list(tensors, "grouped_allgather", name, lambda arrays: run(call, *arrays))


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The array of rank `root_rank`, on every rank, as a new array. Differentiable.

    Of a pytree of arrays, it is the tree of rank `root_rank`. `broadcast_parameters` takes leaves that are no arrays as
    well.

    The gradient is the average over the ranks on the root, and zeros elsewhere. Example, on ranks 0 and 1:

        >>> hvd.broadcast(jnp.array([hvd.rank()]), root_rank=1)
        Array([1], dtype=int32)
    """
    check_root(root_rank, process_set)

    def send(arrays: list[jax.Array], grouped: bool, name: str | None, content: str | None) -> list[jax.Array]:
        return run(Call(OpType.BROADCAST, name, process_set, root=int(root_rank), content=content), *arrays)

    return of_each(tensor, "broadcast", name, send)


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends rows of `tensor` to every rank, and returns the rows that came from each, in rank order. Differentiable.

    Without splits the rows are sent in equal parts, and the result is an array. With them it is that array and how many
    rows came from each rank; that form is not for compiled functions, which need to know all shapes. Example, on ranks
    0 and 1:

        >>> hvd.alltoall(jnp.array([10, 20]) + hvd.rank())
        Array([10, 11], dtype=int32)  # on rank 0; [20, 21] on rank 1
    """
    set_number(process_set, "Alltoall")
    call = Call(OpType.ALLTOALL, name, process_set, splits=_whole(splits))
    rows, *received = run(call, as_array(tensor, "alltoall", name))
    rows = like_given(tensor, rows)
    return rows if splits is None else (rows, *received)


def _whole(splits: Any) -> tuple[int, ...] | None:
    if splits is None:
        return None
    if isinstance(splits, jax.core.Tracer):
        raise NotImplementedError(
            coded(
                OperationCode.NOT_COMPILABLE,
                "Alltoall: splits must be known when the function is compiled, but they are traced. Call it outside of "
                "jax.jit.",
            )
        )
    try:
        given = [one.item() if hasattr(one, "item") else one for one in splits]
    except TypeError:
        given = [splits]
    if not all(isinstance(one, int) for one in given):
        raise ValueError(coded(OperationCode.WRONG_SPLITS, f"Alltoall: splits must be whole numbers, not {splits!r}."))
    return tuple(given)
