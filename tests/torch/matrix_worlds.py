"""The worlds of the op matrix, and which part of it each one has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from event_words import NO_GLOO
from op_cases import DTYPES, OPERATIONS
from worlds import Keeper

from horovod import _core

GLOO = {"HOROVOD_CPU_OPERATIONS": "gloo"}
DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
# Name: ranks, transport, environment.
WORLDS: dict[str, tuple[int, str, dict[str, str]]] = {
    **{f"{size}-{transport}": (size, transport, {}) for size in (2, 3, 4) for transport in ("shm", "tcp")},
    "4-hosts": (4, "hosts", {}),
    "4-sparse": (4, "tcp", {"HOROVOD_FULL_MESH_MEMBERS": "1"}),
    "3-gloo": (3, "auto", GLOO),
}
WHOLE = ["2-shm"]
OTHER = [name for name in WORLDS if name not in WHOLE]
# Of the short tier.
SOME_OTHER = ["3-tcp", "4-hosts", "3-gloo"]
SOME_SETS = ["4-hosts in a set"]
SETS = {f"{name} in a set": (size, way, {**more, **DYNAMIC}) for name, (size, way, more) in WORLDS.items()}


def part_of_the_dtypes(operation: str, part: int, parts: int) -> list[str]:
    """Of all parts together every dtype once, and others for the next operation."""
    first = list(OPERATIONS).index(operation)
    return [dtype for place, dtype in enumerate(DTYPES) if (first + place) % parts == part]


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest) -> Iterator[Keeper]:
    """The world of that name, for parametrize("matrix", names, indirect=True)."""
    size, transport, environment = {**WORLDS, **SETS}[request.param]
    if environment.get("HOROVOD_CPU_OPERATIONS") == "gloo" and NO_GLOO in _core.gloo_obstacle():
        pytest.skip("built without Gloo (libgloo-dev was not there)")
    with Keeper(size, transport, environment) as keeper:
        yield keeper


def members(keeper: Keeper) -> list[int]:
    """All ranks but the first one, so that no member has the same number in the set and in the world."""
    return list(range(1, keeper.size))
