"""Every collective x every dtype against NumPy: all of it in one world, and a part in some others, for which the dtypes
are dealt out to the worlds. test_op_matrix_everywhere.py has all of it in all worlds.

The dtypes of a collective are rows of one test. Worlds are of 2, 3 and 4 ranks, over shared memory, TCP, both, and Gloo
where Horovod was built with it; and process sets in them.
"""

from __future__ import annotations

import pytest
from matrix_worlds import OTHER, SETS, SOME_OTHER, SOME_SETS, WHOLE, matrix, members, part_of_the_dtypes
from op_cases import DTYPES, OPERATIONS, run_row, run_row_in_a_set
from worlds import Keeper

__all__ = ["matrix"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("matrix", WHOLE, indirect=True)
def test_matches_numpy(matrix: Keeper, operation: str) -> None:
    matrix.get().run(run_row, operation, DTYPES)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("matrix", "place"),
    [(name, OTHER.index(name)) for name in SOME_OTHER],
    indirect=["matrix"],
    scope="module",  # a parameter that is no fixture would make both of each test, and so the world
)
def test_matches_numpy_in_part(matrix: Keeper, place: int, operation: str) -> None:
    matrix.get().run(run_row, operation, part_of_the_dtypes(operation, place, len(OTHER)))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("matrix", "place"), [(name, [*SETS].index(name)) for name in SOME_SETS], indirect=["matrix"], scope="module"
)
def test_matches_numpy_in_a_process_set(matrix: Keeper, place: int, operation: str) -> None:
    dtypes = part_of_the_dtypes(operation, place, len(SETS))
    matrix.get().run(run_row_in_a_set, operation, dtypes, members(matrix))


@pytest.mark.parametrize("parts", [len(OTHER), len(SETS)])
def test_all_parts_have_each_pair(parts: int) -> None:
    cells = {
        (operation, dtype, part)
        for operation in OPERATIONS
        for part in range(parts)
        for dtype in part_of_the_dtypes(operation, part, parts)
    }
    assert len({(operation, dtype) for operation, dtype, _ in cells}) == len(OPERATIONS) * len(DTYPES)
    assert len({(operation, part) for operation, _, part in cells}) == len(OPERATIONS) * parts
    assert len({(dtype, part) for _, dtype, part in cells}) == len(DTYPES) * parts
