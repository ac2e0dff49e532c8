"""Every collective x every dtype x 2, 3 and 4 ranks x shared memory and TCP, against NumPy; also in process sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from op_cases import DTYPES, OPERATIONS, run_case, run_row_in_a_set
from worlds import Keeper, World


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_matches_numpy(world: World, operation: str, dtype: str) -> None:
    world.run(run_case, operation, dtype)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((size, transport), id=f"{size}-{transport}", marks=pytest.mark.xdist_group(f"row-{transport}"))
        for size in (2, 3, 4)
        for transport in ("shm", "tcp")
    ],
)
def dynamic(request: pytest.FixtureRequest) -> Iterator[Keeper]:
    with Keeper(*request.param, {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}) as keeper:
        yield keeper


@pytest.mark.parametrize("operation", OPERATIONS)
def test_matches_numpy_in_a_process_set(dynamic: Keeper, operation: str) -> None:
    """All ranks but the first one, so that no member has the same number in the set and in the world."""
    dynamic.get().run(run_row_in_a_set, operation, list(range(1, dynamic.size)))
