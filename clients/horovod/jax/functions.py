"""Broadcasts of parameters and optimizer states, barrier, join and shutdown; the functions for objects."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from horovod.base.errors import TrainingCode, coded
from horovod.common import basics
from horovod.common.broadcast_order import check_broadcast
from horovod.common.ops import collectives
from horovod.common.ops.handles import synchronize
from horovod.common.ops.objects import allgather_object, broadcast_object
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.jax.arrays import COLLECTIVES, DTYPE_CODES, is_wide
from horovod.jax.devices import in_host_memory, placed_as
from horovod.jax.waiting import end_compiled_calls, wait_for_compiled_calls
from horovod.worker.runtime.context import is_member

__all__ = [
    "allgather_object",
    "barrier",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "join",
]

T = TypeVar("T")


def broadcast_parameters(params: T, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> T:
    """The pytree that rank `root_rank` has, on every rank, as a new pytree. Call it before training. Example:

        >>> params = hvd.broadcast_parameters(params, root_rank=0)

    Of a Flax nnx module, `nnx.state(model)` is such a tree; `nnx.update(model, ...)` puts the result back.

    Args:
        params: a pytree with the same structure, shapes and dtypes on all ranks. Leaves that are no arrays (numbers,
            NumPy's scalars, functions) are sent with pickle, and so are NumPy's arrays of 64 bits unless jax_enable_x64
            is set: they come as they are. NumPy's other arrays become JAX's.
        root_rank: a global rank of the process set.
        process_set: the ranks that take part.

    Raises:
        ValueError: the trees of the ranks differ (on all ranks), a root that takes no part, a bad process set.
        HorovodInternalError: a rank was lost.
    """
    return _broadcast_in_order(params, root_rank, "broadcast_parameters", process_set)


def broadcast_optimizer_state(opt_state: T, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> T:
    """`broadcast_parameters` for the state of an Optax optimizer, under separate names. Example:

    >>> opt_state = hvd.broadcast_optimizer_state(optimizer.init(params), root_rank=0)

    Takes and raises what `broadcast_parameters` does.
    """
    return _broadcast_in_order(opt_state, root_rank, "broadcast_optimizer_state", process_set)


def _broadcast_in_order(tree: T, root_rank: int, name: str, process_set: ProcessSet) -> T:
    paths = (jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree))
    check_broadcast(name, paths, process_set)
    return broadcast_tree(tree, root_rank, name, process_set)


def broadcast_tree(tree: T, root_rank: int, name: str, process_set: ProcessSet) -> T:
    leaves, structure = jax.tree.flatten_with_path(tree)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    values = [value for _, value in leaves]
    _check_alike([f"{path} {_described(value)}" for path, value in zip(paths, values, strict=True)], name, process_set)
    arrays = [place for place, value in enumerate(values) if is_array(value)]
    others = [place for place in range(len(values)) if place not in set(arrays)]
    handles = [
        COLLECTIVES.broadcast_async(_data(values[place]), root_rank, f"{name}.{paths[place]}", process_set)
        for place in arrays
    ]
    current_stream = COLLECTIVES.framework.current_stream
    for place, handle in zip(arrays, handles, strict=True):
        values[place] = _like(values[place], synchronize(handle, current_stream))
    if others:
        sent = broadcast_object([values[place] for place in others], root_rank, f"{name}.others", process_set)
        for place, value in zip(others, sent, strict=True):
            values[place] = value
    result: T = jax.tree.unflatten(structure, values)
    return result


def is_array(value: Any) -> bool:
    """Whether it travels as an array. NumPy's do where JAX can keep them, and become JAX's; its scalars are objects."""
    if not (hasattr(value, "dtype") and hasattr(value, "shape")) or isinstance(value, np.generic) or is_wide(value):
        return False
    return _is_key(value) or value.dtype in DTYPE_CODES


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _data(value: Any) -> jax.Array:
    return in_host_memory(jax.random.key_data(value) if _is_key(value) else value)


def _like(value: Any, data: jax.Array) -> Any:
    data = placed_as(value, data)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value)) if _is_key(value) else data


def _described(value: Any) -> str:
    if is_array(value):
        return f"{jnp.shape(value)} {value.dtype}"
    return f"{value.shape} {value.dtype} of NumPy" if isinstance(value, np.ndarray | np.generic) else "object"


def _check_alike(mine: list[str], name: str, process_set: ProcessSet) -> None:
    everyone = allgather_object(mine, f"{name}.leaves", process_set)
    for place, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            ranks = process_set.ranks or range(len(everyone))
            only = sorted(set(theirs).symmetric_difference(everyone[0]))
            sentence = (
                f"{name}: the trees of rank {ranks[0]} and rank {ranks[place]} differ: "
                f"{'; '.join(only[:5]) or 'the order of their leaves'} is not in both. Build the same model everywhere."
            )
            raise ValueError(coded(TrainingCode.DIFFERENT_MODELS, sentence))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Blocks until every rank of `process_set` has called it. Collectives of its compiled functions complete first.

    >>> hvd.barrier()
    """
    wait_for_compiled_calls()
    collectives.barrier(process_set)


def join(device: int = -1) -> int:
    """Declares that this rank has no more data, and blocks until all ranks of the world have called it.

    Meanwhile it contributes zeros to every allreduce of the others in the global process set, so that they can train
    on; Average still divides by the number of all ranks. Collectives that its compiled functions have started
    complete first. Any other operation in the global process set fails on the ranks that call it.

    Returns:
        The rank that joined last. It has seen the most steps: a good root for broadcasting the final state.

    Example, on two ranks of which one has more data:

        >>> for batch in [2.0] if hvd.rank() == 0 else [2.0, 4.0]:
        ...     average = hvd.allreduce(jnp.array([batch]), name="average")
        >>> params = hvd.broadcast_parameters(params, root_rank=hvd.join())
    """
    wait_for_compiled_calls()
    return collectives.join(device)


def shutdown() -> None:
    """Shuts Horovod down once collectives of compiled functions of this thread are over. Does nothing before init().

    >>> hvd.shutdown()
    """
    if is_member():
        end_compiled_calls()
    basics.shutdown()
