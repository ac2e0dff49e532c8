"""The arithmetic of epochs, and parameters by all their names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspark")
from horovod.spark.common.serialization import decode, encode
from horovod.spark.common.steps import Epoch


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 40))
def test_every_row_counts_once(total: int, size: int, batch_size: int) -> None:
    epoch = Epoch(total, size, batch_size)
    rows = [[epoch.rows(rank, step) for rank in range(size)] for step in range(epoch.steps)]
    assert sum(map(sum, rows)) == total
    for step, of_ranks in enumerate(rows):
        assert sum(of_ranks) > 0
        # The mean over ranks of scaled means is the mean over rows: each row has the weight 1 / rows of the step.
        for rank, own in enumerate(of_ranks):
            assert epoch.scale(rank, step) == pytest.approx(own * size / sum(of_ranks))


def test_parameters_are_json_or_pickled() -> None:
    for value in (None, True, 1, 0.5, "text", [1, [2]], {"a": [1.0]}):
        assert encode(value) is value
    for value in ((1, 2), {1: 2}, float("inf"), {"horovod.pickled": 1}, [(1,)], int):
        encoded = encode(value)
        assert isinstance(encoded, dict)
        assert decode(encoded) == value
