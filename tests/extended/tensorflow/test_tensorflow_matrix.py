"""Every collective x every dtype against NumPy, eager and in functions: the cases of tests/torch/op_cases.py.

With two ranks over shared memory all of it; with three over TCP, and in a process set of two of them, a part in which
every collective and every dtype is.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from matrix_worlds import part_of_the_dtypes
from op_cases import DTYPES, EIGHT_BIT_FLOATS
from op_cases import OPERATIONS as ALL
from worlds import Keeper, World

OPERATIONS = [name for name in ALL if name != "sparse_allreduce"]


def _row(operation: str, dtypes: list[str]) -> None:
    import tensorflow_cases

    tensorflow_cases.run_row(operation, dtypes)


def _row_in_a_set(operation: str, dtypes: list[str], ranks: list[int]) -> None:
    import tensorflow_cases

    tensorflow_cases.run_row_in_a_set(operation, dtypes, ranks)


@pytest.fixture(scope="module")
def three() -> Iterator[Keeper]:
    environment = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    with Keeper(3, "tcp", environment, preloaded="preloaded_tensorflow") as keeper:
        yield keeper


@pytest.mark.parametrize("operation", OPERATIONS)
def test_matches_numpy(tf_pair: World, operation: str) -> None:
    tf_pair.run(_row, operation, [*DTYPES, *EIGHT_BIT_FLOATS])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_matches_numpy_with_three_ranks_and_in_a_set(three: Keeper, operation: str) -> None:
    three.get().run(_row, operation, part_of_the_dtypes(operation, 0, 6))
    three.get().run(_row_in_a_set, operation, part_of_the_dtypes(operation, 1, 6), [1, 2])
