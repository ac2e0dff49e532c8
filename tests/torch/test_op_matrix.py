"""Every collective x every dtype x 2, 3 and 4 ranks x shared memory and TCP, against NumPy."""

from __future__ import annotations

import pytest
from op_cases import DTYPES, OPERATIONS, run_case
from worlds import World


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_matches_numpy(world: World, operation: str, dtype: str) -> None:
    world.run(run_case, operation, dtype)
