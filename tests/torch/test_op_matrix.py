"""Every collective x every dtype x 2, 3 and 4 ranks x shared memory and TCP, against NumPy; also in process sets.

Three ranks over Gloo, where Horovod was built with it, do the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from op_cases import DTYPES, OPERATIONS, run_case, run_row_in_a_set
from worlds import Keeper, World

from horovod import _core


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_matches_numpy(world: World, operation: str, dtype: str) -> None:
    world.run(run_case, operation, dtype)


@pytest.fixture(scope="module")
def gloo() -> Iterator[Keeper]:
    if "has no Gloo" in _core.gloo_obstacle():
        pytest.skip("built without Gloo (libgloo-dev was not there)")
    environment = {"HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    with Keeper(3, "auto", environment) as keeper:
        yield keeper


@pytest.mark.xdist_group("torch-gloo")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_matches_numpy_over_gloo(gloo: Keeper, operation: str, dtype: str) -> None:
    gloo.get().run(run_case, operation, dtype)


@pytest.mark.xdist_group("torch-gloo")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_matches_numpy_in_a_process_set_over_gloo(gloo: Keeper, operation: str) -> None:
    gloo.get().run(run_row_in_a_set, operation, [1, 2])


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
