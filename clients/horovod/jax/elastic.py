"""Elastic training: processes may be lost, or replaced, while the others keep their weights and go on.

>>> state = hvd.elastic.JaxState(params=params, opt_state=opt_state, batch=0)
>>> @hvd.elastic.run
... def train(state):
...     while state.batch < 100:
...         state.params, state.opt_state, loss = step(state.params, state.opt_state)
...         state.batch += 1
...         state.commit()
>>> train(state)
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horovod.common.basics import init as init
from horovod.common.basics import join_again, rank
from horovod.common.basics import shutdown as shutdown
from horovod.common.elastic import OPTIMIZER, ObjectState, leave_at_next_commit, run_fn
from horovod.common.ops.objects import broadcast_keeping
from horovod.common.process_sets import global_process_set
from horovod.jax.functions import allgather_object, broadcast_object, broadcast_tree, is_array
from horovod.jax.waiting import end_compiled_calls, lost_ranks

__all__ = ["JaxState", "leave_at_next_commit", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a training function `func(state, ...)`, so that it goes on after failures.

    >>> @hvd.elastic.run
    ... def train(state):
    ...     while state.batch < 1000:
    ...         state.batch += 1
    ...         state.commit()
    >>> train(state)

    Before `func` starts, the state is made equal on all ranks. When a collective in it fails because a rank was lost,
    the state goes back to its last commit; when hosts come or go (HostsUpdatedInterrupt from `state.commit()`), nothing
    is undone. Then this process shuts Horovod down and calls hvd.init() again with the same arguments; once the
    next world stands, the state is made equal again and `func` called again. In an elastic
    job (HOROVOD_MIN_SIZE) the next world has the remaining and the new processes; in any other job it has as many
    processes as before.

    Functions that JAX has compiled contain numbers of the world, such as hvd.size() and the ids of process sets, so JAX
    compiles all of them again in another world (jax.clear_caches). Between hvd.init() and `func` a script must run no
    collective. Process sets that were added after hvd.init() are gone in the next world; add them in a callback of
    `state.register_reset_callbacks`.

    Raises:
        ValueError: before hvd.init(), or the next world did not stand in time ("Horovod initialization failed. ...").
        Exception: any other exception of `func` than HorovodInternalError, HostsUpdatedInterrupt and the errors in
            which JAX reports a lost rank.
    """
    return run_fn(func, _join_next_world, lost_ranks)


def _join_next_world() -> None:
    end_compiled_calls()
    join_again()
    jax.clear_caches()


@dataclass(frozen=True)
class _Travels:
    """Takes the place of an array in a pickled tree; the array itself is broadcast afterwards."""

    shape: tuple[int, ...]
    dtype: Any
    key: str | None  # the implementation of a random key


class JaxState(ObjectState):
    """The state of a training: pytrees and plain values as attributes, all given by name.

    Arrays are sent as such, everything else with pickle. NumPy's scalars, and its arrays of 64 bits unless
    jax_enable_x64 is set, stay as they are; its other arrays become JAX's. Saved values are copies, so steps may donate
    their arguments. A tree may have another structure in a process that is new; it gets that of the others. Modules
    and optimizers of Flax nnx stay the objects that they are, also in lists, dicts and objects, and get the arrays.

    Args:
        kwargs: the values, of the same names on all ranks.

    `sync` sends from rank 0, or, in a training that some ranks were in already, from the one of these that has
    committed most often. Example:

        >>> state = hvd.elastic.JaxState(params=params, opt_state=opt_state, epoch=0)
        >>> state.epoch = 7
        >>> state.commit()
        >>> state.epoch = 8
        >>> state.restore()
        >>> state.epoch
        7
    """

    def __init__(self, **kwargs: Any) -> None:
        self._saved_arrays: list[tuple[Any, Any]] = []  # (part, its saved state)
        super().__init__(broadcast_object, rank, **kwargs)
        self.save()

    def _kind_of(self, value: Any) -> str | None:
        if (nnx := _nnx()) is None or not isinstance(value, getattr(nnx, "Pytree", None) or nnx.Object):
            return None
        return OPTIMIZER if isinstance(value, nnx.Optimizer) else "module"

    def save(self) -> None:
        self._settle()
        super().save()
        self._save_arrays()

    def _save_arrays(self) -> None:
        self._saved_arrays = [(one, copy.deepcopy(_nnx().state(one))) for one in self._parts.found.values()]

    def restore(self) -> None:
        for part, arrays in self._saved_arrays:
            _nnx().update(part, copy.deepcopy(arrays))  # the next step may donate these
        super().restore()

    def sync(self) -> None:
        self._choose_source(allgather_object)
        parts = [one for one in self._agreed.values() if self._kind_of(one) is not None]
        if parts:
            states = [_nnx().state(one) for one in parts]
            leaves, structure = jax.tree.flatten(states)
            received = self._broadcast_keeping(leaves if rank() == self._source else None, self._source, ())
            for part, state in zip(parts, jax.tree.unflatten(structure, received), strict=True):
                _nnx().update(part, state)
        super().sync()
        self._save_arrays()

    def _settle(self) -> None:
        with lost_ranks():
            values = jax.tree.leaves({name: getattr(self, name) for name in self._saved_state})
            # The state may still hold arrays that the last step took as donated arguments; they are deleted.
            jax.block_until_ready([one for one in values if not (isinstance(one, jax.Array) and one.is_deleted())])

    def _broadcast_keeping(self, values: Any, root_rank: int, kept: Sequence[Any]) -> Any:
        """For trees with arrays: sends the structure, shapes and dtypes first, then the arrays."""
        ids = {id(one) for one in kept}

        def is_kept(value: Any) -> bool:
            return id(value) in ids

        def is_kept_or_travels(value: Any) -> bool:
            return is_kept(value) or isinstance(value, _Travels)

        if values is not None:  # arrays of JAX on this rank, as on all others
            values = jax.tree.map(
                lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) and is_array(leaf) else leaf,
                values,
                is_leaf=is_kept,
            )
        described = None if values is None else jax.tree.map(_described, values, is_leaf=is_kept)
        received = broadcast_keeping(described, root_rank, kept, "elastic.trees")
        if values is None:
            values = jax.tree.map(_empty, received, is_leaf=is_kept_or_travels)
        arrays = [leaf for leaf in jax.tree.leaves(values, is_leaf=is_kept) if is_array(leaf)]
        sent = iter(broadcast_tree(arrays, root_rank, "elastic.arrays", global_process_set))
        return jax.tree.map(lambda leaf: next(sent) if is_array(leaf) else leaf, values, is_leaf=is_kept)


def _nnx() -> Any:
    """flax.nnx, whose modules and optimizers change in place; None where the script does not use it."""
    return sys.modules.get("flax.nnx")


def _described(leaf: Any) -> Any:
    if not is_array(leaf):
        return leaf
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return _Travels(
        leaf.shape, None if is_key else np.dtype(leaf.dtype), str(jax.random.key_impl(leaf)) if is_key else None
    )


def _empty(leaf: Any) -> Any:
    if not isinstance(leaf, _Travels):
        return leaf
    if leaf.key is None:
        with jax.enable_x64(True):  # else one of 64 bits would have 32
            return jnp.zeros(leaf.shape, leaf.dtype)
    data = jax.random.key_data(jax.random.key(0, impl=leaf.key))
    return jax.random.wrap_key_data(jnp.broadcast_to(data, (*leaf.shape, *data.shape)), impl=leaf.key)
