"""Every collective x every dtype against NumPy, outside of compiled functions and in them: tests/torch/op_cases.py.

With two ranks over shared memory half of the dtypes for each operation; with three over TCP, in a process set of two of
them, a smaller part. In both there is every collective and every dtype.
"""

from __future__ import annotations

import pytest
from matrix_worlds import part_of_the_dtypes
from op_cases import EIGHT_BIT_FLOATS
from op_cases import OPERATIONS as ALL
from worlds import World

OPERATIONS = [name for name in ALL if name != "sparse_allreduce"]


def _rows(dtypes: dict[str, list[str]], ranks: list[int] | None = None) -> None:
    import jax_cases

    for operation, some in dtypes.items():
        if ranks is None:
            jax_cases.run_row(operation, some)
        else:
            jax_cases.run_row_in_a_set(operation, some, ranks)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_matches_numpy(jax_pair: World, operation: str) -> None:
    jax_pair.run(_rows, {operation: [*part_of_the_dtypes(operation, 0, 2), *EIGHT_BIT_FLOATS]})


def test_matches_numpy_in_a_set_of_three_ranks() -> None:
    parts = {operation: part_of_the_dtypes(operation, 1, 6) for operation in OPERATIONS}
    with World(3, "tcp", {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, preloaded="preloaded_jax") as world:
        world.run(_begin)
        world.run(_rows, parts, [1, 2])


def _begin() -> None:
    import horovod.jax as hvd

    hvd.init()
