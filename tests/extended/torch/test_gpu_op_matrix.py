"""Every collective x every dtype on tensors on GPUs, against NumPy: on real ones where there are any, with one rank and
with two on one GPU, and on those of the libraries that stand in for the driver and for NCCL.

What NCCL can't do goes through the host's memory: no cell is refused. More ranks than GPUs share one, each as a host of
its own to NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu_worlds import WORLDS
from op_cases import DTYPES, EIGHT_BIT_FLOATS, OPERATIONS, run_case, run_row_in_a_set
from worlds import Keeper

SIZES = [("standin", 1), ("standin", 2), ("cuda", 1), ("cuda", 2)]


@pytest.fixture(scope="module", params=SIZES, ids=lambda world: f"{world[0]}-{world[1]}")
def gpus(request: pytest.FixtureRequest) -> Iterator[Keeper]:
    kind, size = request.param
    with WORLDS[kind](size) as keeper:
        yield keeper


@pytest.mark.parametrize("dtype", [*DTYPES, *EIGHT_BIT_FLOATS])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_matches_numpy(gpus: Keeper, operation: str, dtype: str) -> None:
    gpus.get().run(run_case, operation, dtype)


@pytest.fixture(scope="module", params=WORLDS)
def sets(request: pytest.FixtureRequest) -> Iterator[Keeper]:
    with WORLDS[request.param](3, HOROVOD_DYNAMIC_PROCESS_SETS="1") as keeper:
        yield keeper


@pytest.mark.parametrize("operation", OPERATIONS)
def test_matches_numpy_in_a_process_set(sets: Keeper, operation: str) -> None:
    """All ranks but the first one, so that no member has the same number in the set and in the world."""
    sets.get().run(run_row_in_a_set, operation, DTYPES, [1, 2])


@pytest.fixture(scope="module", params=WORLDS)
def hosts(request: pytest.FixtureRequest) -> Iterator[Keeper]:
    with WORLDS[request.param](4, "hosts") as keeper:
        yield keeper


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", ["adasum", "allreduce"])
def test_two_hosts_with_two_ranks_each(hosts: Keeper, operation: str, dtype: str) -> None:
    """Where what is computed, or which way, depends on the hosts."""
    hosts.get().run(run_case, operation, dtype)
