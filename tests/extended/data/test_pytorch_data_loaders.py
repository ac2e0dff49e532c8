"""The loaders of `horovod.spark.data_loaders`: rows of a reader as batches of tensors."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from error_codes import ends_with

pytest.importorskip("torch")
from horovod.base.errors import DataCode, TrainingCode
from horovod.data import ParquetReader
from horovod.spark.data_loaders import pytorch_data_loaders as loaders

ROWS = 100


@pytest.fixture
def path(tmp_path: Path) -> str:
    numbers = np.arange(ROWS)
    lists = pa.array([[i, 2 * i] for i in numbers], pa.list_(pa.float32()))
    table = pa.table({"x": numbers, "list": lists, "text": [str(i) for i in numbers]})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=30)
    return str(tmp_path)


def rows_of(loader: Any) -> list[int]:
    return list(itertools.chain.from_iterable(batches_of(loader)))


def batches_of(loader: Any) -> list[list[int]]:
    batches = []
    for batch in loader:
        numbers = batch["x"].tolist()
        assert batch["list"].tolist() == [[i, 2 * i] for i in numbers]
        assert batch["text"] == [str(i) for i in numbers]
        batches.append(numbers)
    return batches


@pytest.mark.parametrize("is_async", [False, True])
def test_an_iteration_of_the_reader(path: str, is_async: bool, capsys: pytest.CaptureFixture[str]) -> None:
    kind: Any = loaders.PytorchAsyncDataLoader if is_async else loaders.PytorchDataLoader
    loader = kind(reader=ParquetReader(path, shuffle=False), batch_size=45)
    assert [len(batch) for batch in batches_of(loader)] == [45, 45, 10]
    assert rows_of(loader) == list(range(ROWS))
    assert len(loader) == 3
    shuffled = kind(reader=ParquetReader(path, shuffle=False), batch_size=45, shuffling_queue_capacity=60)
    first, second = (rows_of(shuffled) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second
    limited = kind(reader=ParquetReader(path), batch_size=10, limit_step_per_epoch=3, name="train", verbose=True)
    assert len(limited) == len(batches_of(limited)) == 3
    assert capsys.readouterr().out == "train: 3 batches in iteration 0\n"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("epochs", [None, 1])
def test_iterations_that_go_on(path: str, is_async: bool, epochs: int | None) -> None:
    kind: Any = loaders.PytorchInfiniteAsyncDataLoader if is_async else loaders.PytorchInfiniteDataLoader
    loader = kind(reader=ParquetReader(path, epochs=epochs), batch_size=10, limit_step_per_epoch=4)
    assert len(loader) == 4
    came = [row for _ in range(5) for row in rows_of(loader)]
    assert sorted(came[:ROWS]) == sorted(came[ROWS:]) == list(range(ROWS))


def test_rows_in_memory(path: str) -> None:
    reader = ParquetReader(path)
    loader = loaders.PytorchInmemAsyncDataLoader(reader=reader, batch_size=30, num_epochs=2, shuffle=True)
    first, second = (rows_of(loader) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second
    assert reader.epoch == 1
    assert len(loader) == 4


def test_what_loaders_refuse(path: str) -> None:
    reader, endless = ParquetReader(path), ParquetReader(path, epochs=None)
    for make in (
        lambda: loaders.PytorchDataLoader(reader, 0),
        lambda: loaders.PytorchDataLoader(reader, 1, -1),
        lambda: loaders.PytorchDataLoader(reader, 1, limit_step_per_epoch=0),
        lambda: loaders.PytorchInfiniteDataLoader(endless, 1),
        lambda: loaders.PytorchInmemDataLoader(endless, 1),
    ):
        with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT)):
            make()
    empty = loaders.PytorchInfiniteDataLoader(ParquetReader(path, rank=0, size=101), 1, limit_step_per_epoch=2)
    with pytest.raises(ValueError, match=ends_with(DataCode.NOTHING_TO_REPEAT, "PytorchInfiniteDataLoader")):
        list(empty)
