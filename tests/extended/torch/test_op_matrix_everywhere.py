"""The whole op matrix in the worlds and process sets that test_op_matrix.py has a part of it in."""

from __future__ import annotations

import pytest
from matrix_worlds import OTHER, SETS, matrix, members
from op_cases import DTYPES, OPERATIONS, run_row, run_row_in_a_set
from worlds import Keeper

__all__ = ["matrix"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("matrix", OTHER, indirect=True)
def test_matches_numpy_everywhere(matrix: Keeper, operation: str) -> None:
    matrix.get().run(run_row, operation, DTYPES)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("matrix", SETS, indirect=True)
def test_matches_numpy_in_every_process_set(matrix: Keeper, operation: str) -> None:
    matrix.get().run(run_row_in_a_set, operation, DTYPES, members(matrix))
