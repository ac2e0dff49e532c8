"""Worlds of ranks with JAX, or the reason why there are none."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from worlds import Keeper, World

from horovod.coordinator.core.agreement.deadlock import DeadlockTimes

MISSING = [name for name in ("jax", "optax") if importlib.util.find_spec(name) is None]

if MISSING:

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        for item in items:
            if "jax" in item.path.parts:
                reason = f"not installed: {', '.join(MISSING)}; pip install '.[jax]'"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def jax_pair_keeper() -> Iterator[Keeper]:
    with Keeper(2, "shm", {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, preloaded="preloaded_jax") as keeper:
        yield keeper


@pytest.fixture
def jax_pair(jax_pair_keeper: Keeper) -> World:
    """A running world of two ranks over shared memory."""
    return jax_pair_keeper.get()


@pytest.fixture(scope="module")
def deadlocked_jax_pair() -> Iterator[World]:
    """For ranks that are to wait for each other: the coordinator finds that in seconds, not after a minute."""
    soon = DeadlockTimes(still_s=1.0, idle_s=4.0, look_s=0.1)
    with World(2, "shm", preloaded="preloaded_jax", deadlock=soon) as world:
        yield world
