"""Worlds of ranks with Lightning, or the reason why there are none."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from worlds import Keeper, World

if importlib.util.find_spec("lightning") is None:

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        for item in items:
            if "lightning" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="lightning is not installed"))


@pytest.fixture(scope="session")
def lightning_pair_keeper() -> Iterator[Keeper]:
    with Keeper(2, "shm", preloaded="preloaded_lightning") as keeper:
        yield keeper


@pytest.fixture
def lightning_pair(lightning_pair_keeper: Keeper) -> World:
    """A running world of two ranks over shared memory."""
    return lightning_pair_keeper.get()
