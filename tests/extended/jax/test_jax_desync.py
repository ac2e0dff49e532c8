"""Ranks whose trees have other keys but the same shapes: an error with the keys, and never another one's gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from worlds import Keeper, World

from horovod.base.errors import OperationCode, code_of
from horovod.coordinator.core.agreement.deadlock import DeadlockTimes


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    soon = DeadlockTimes(still_s=1.0, idle_s=3.0, look_s=0.1)
    with Keeper(2, "shm", preloaded="preloaded_jax", deadlock=soon) as keeper:
        yield keeper.get()


def _reduce(compiled: bool, key: str) -> Any:
    import jax
    import jax.numpy as jnp
    import optax

    import horovod.jax as hvd

    params = {"bias": jnp.ones(2), key: jnp.ones(2)}
    if not compiled:
        return hvd.grad(lambda tree: sum(map(jnp.sum, tree.values())))(params)
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1), groups=2)
    return jax.block_until_ready(jax.jit(optimizer.update)(params, optimizer.init(params), params))


def _other_keys(compiled: bool) -> str:
    import jax

    import horovod.jax as hvd
    from horovod.jax.waiting import end_compiled_calls

    _reduce(compiled, "kernel")
    with pytest.raises((hvd.HorovodInternalError, jax.errors.JaxRuntimeError)) as caught:
        _reduce(compiled, f"of_rank_{hvd.rank()}")
    end_compiled_calls()
    jax.block_until_ready(_reduce(compiled, "kernel"))
    first_line = str(caught.value).splitlines()[0]
    assert code_of(first_line) is OperationCode.DEADLOCK, first_line
    return first_line


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_trees_of_other_keys_never_meet(world: World, compiled: bool) -> None:
    for sentence in world.run(_other_keys, compiled):
        for rank in range(2):
            assert f"rank {rank} waits for grouped_allreduce." in sentence
            assert f"of_rank_{rank}" in sentence
