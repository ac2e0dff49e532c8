"""Worlds of ranks with MXNet, in an environment of its own, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mxnet_environment
import pytest
from worlds import Keeper, World

from horovod.coordinator.core.agreement.deadlock import DeadlockTimes

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session")
def mxnet_python() -> Path:
    """The interpreter of an environment with MXNet."""
    return mxnet_environment.python()


@pytest.fixture(scope="session")
def mxnet_pair_keeper(mxnet_python: Path) -> Iterator[Keeper]:
    environment = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    with Keeper(2, "shm", environment, preloaded="preloaded_mxnet", python=str(mxnet_python)) as keeper:
        yield keeper


@pytest.fixture
def mxnet_pair(mxnet_pair_keeper: Keeper) -> World:
    """A running world of two ranks over shared memory."""
    return mxnet_pair_keeper.get()


@pytest.fixture(scope="module")
def deadlocked_mxnet_pair(mxnet_python: Path) -> Iterator[World]:
    """For ranks that are to wait for each other: the coordinator finds that in seconds, not after a minute."""
    soon = DeadlockTimes(still_s=1.0, idle_s=4.0, look_s=0.1)
    with World(2, "shm", preloaded="preloaded_mxnet", python=str(mxnet_python), deadlock=soon) as world:
        yield world
