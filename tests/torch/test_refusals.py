"""Wrong use is refused alike by two ranks, in a set of one of them, and (test_alone.py) in a world of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import refusals
from worlds import Keeper


@pytest.fixture(scope="module")
def dynamic() -> Iterator[Keeper]:
    with Keeper(2, "shm", {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}) as keeper:
        yield keeper


def test_by_two_ranks(dynamic: Keeper) -> None:
    dynamic.get().run(refusals.run_in_the_world)


def test_in_a_set_of_one(dynamic: Keeper) -> None:
    dynamic.get().run(refusals.run_in_a_set, [1])
