"""The worlds that tests share. Each (size, transport) is one xdist group, so that its processes are started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds import Keeper, World

WORLDS = [*((size, transport) for size in (2, 3, 4) for transport in ("shm", "tcp")), (4, "hosts")]


def _params(worlds: list[tuple[int, str]]) -> list[object]:
    return [
        pytest.param(world, id=f"{world[0]}-{world[1]}", marks=pytest.mark.xdist_group(f"torch-{world[0]}-{world[1]}"))
        for world in worlds
    ]


@pytest.fixture(scope="session", params=_params(WORLDS))
def _keeper(request: pytest.FixtureRequest) -> Iterator[Keeper]:
    with Keeper(*request.param) as keeper:
        yield keeper


@pytest.fixture
def world(_keeper: Keeper) -> World:
    """A running world of each size over each transport."""
    return _keeper.get()


@pytest.fixture(scope="session", params=_params([(2, "shm")]))
def _pair_keeper(request: pytest.FixtureRequest) -> Iterator[Keeper]:
    with Keeper(*request.param) as keeper:
        yield keeper


@pytest.fixture
def pair(_pair_keeper: Keeper) -> World:
    """A running world of two ranks over shared memory, for what depends on neither size nor transport."""
    return _pair_keeper.get()
