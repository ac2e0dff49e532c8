"""Every collective x every dtype on tensors on GPUs, against NumPy: on real ones where there are any, with one rank and
with two on one GPU, and on those of the libraries that stand in for the driver and for NCCL.

What NCCL can't do goes through the host's memory: no cell is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu_worlds import cuda_world, standin_world
from op_cases import DTYPES, OPERATIONS, run_case
from worlds import Keeper

pytestmark = pytest.mark.xdist_group("gpu")

WORLDS = [("standin", 1), ("standin", 2), ("cuda", 1), ("cuda", 2)]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def gpus(request: pytest.FixtureRequest) -> Iterator[tuple[str, Keeper]]:
    kind, size = request.param
    with (standin_world if kind == "standin" else cuda_world)(size) as keeper:
        yield kind, keeper


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_matches_numpy(gpus: tuple[str, Keeper], operation: str, dtype: str) -> None:
    kind, keeper = gpus
    if (operation, kind) == ("sparse_allreduce", "standin"):
        pytest.skip("the stand-in has no sparse tensors")
    keeper.get().run(run_case, operation, dtype)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Keeper]:
    with standin_world(4, "hosts") as keeper:
        yield keeper


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", ["adasum", "allreduce"])
def test_two_hosts_with_two_ranks_each(hosts: Keeper, operation: str, dtype: str) -> None:
    """Where what is computed, or which way, depends on the hosts."""
    hosts.get().run(run_case, operation, dtype)
