"""The batches of an estimator's epochs depend on the number of the epoch alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from error_codes import ends_with

from horovod.base.errors import DataCode
from horovod.spark.common.batches import Batches, Source

ROWS, BATCH, STEPS = 100, 8, 5


@pytest.mark.parametrize("steps", [None, STEPS])
def test_epochs_are_the_same_whatever_was_read_before(tmp_path: Path, steps: int | None) -> None:
    pq.write_table(pa.table({"x": np.arange(ROWS)}), tmp_path / "0.parquet", row_group_size=30)
    source = Source(
        path=str(tmp_path),
        columns=("x",),
        total=ROWS,
        batch_size=BATCH,
        steps=steps,
        shuffle=True,
        seed=3,
        workers=1,
        cache=False,
        sparse={},
        transformation=None,
    )

    def rows(batches: Batches, epoch: int) -> list[list[int]]:
        return [batch["x"].tolist() for batch, _, _ in batches.of_epoch(epoch)]

    with pytest.raises(OSError, match=ends_with(DataCode.UNREADABLE_DATA, tmp_path, ROWS, ROWS + 1)):
        Batches(replace(source, total=ROWS + 1), rank=0, size=1)
    undisturbed = Batches(source, rank=0, size=1)
    epochs = [rows(undisturbed, epoch) for epoch in range(5)]
    assert [len(epoch) for epoch in epochs] == [undisturbed.steps] * 5
    if steps is not None:  # the data are gone through epoch after epoch
        together = [row for epoch in epochs for batch in epoch for row in batch]
        assert sorted(together[:ROWS]) == sorted(together[ROWS : 2 * ROWS]) == list(range(ROWS))

    resumed = Batches(source, rank=0, size=1)
    assert [rows(resumed, epoch) for epoch in (3, 4, 1, 1, 2)] == [epochs[epoch] for epoch in (3, 4, 1, 1, 2)]
    given_up = resumed.of_epoch(3)
    assert next(given_up)[0]["x"].tolist() == epochs[3][0]
    assert rows(resumed, 0) == epochs[0]  # while the other one is under way
    given_up.close()  # type: ignore[attr-defined]
    assert rows(resumed, 3) == epochs[3]
