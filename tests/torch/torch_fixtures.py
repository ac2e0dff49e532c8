"""The worlds that tests share, for the conftest.py of this folder and of tests/extended/torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiers
from worlds import Keeper, World

WORLDS = [*((size, transport) for size in (2, 3, 4) for transport in ("shm", "tcp")), (4, "hosts")]
# Every size, every transport and hosts of several ranks, each once.
SHORT_WORLDS = [(2, "shm"), (3, "tcp"), (4, "hosts")]


def world_id(world: tuple[int, str]) -> str:
    return f"{world[0]}-{world[1]}"


@pytest.fixture(
    scope="session",
    params=tiers.pick(SHORT_WORLDS, [world for world in WORLDS if world not in SHORT_WORLDS]),
    ids=world_id,
)
def world_keeper(request: pytest.FixtureRequest) -> Iterator[Keeper]:
    with Keeper(*request.param) as keeper:
        yield keeper


@pytest.fixture
def world(world_keeper: Keeper) -> World:
    """A running world of each size over each transport; in make test of each size and of each transport."""
    return world_keeper.get()


@pytest.fixture(scope="session")
def pair_keeper() -> Iterator[Keeper]:
    with Keeper(2, "shm") as keeper:
        yield keeper


@pytest.fixture
def pair(pair_keeper: Keeper) -> World:
    """A running world of two ranks over shared memory, for what depends on neither size nor transport."""
    return pair_keeper.get()
