"""ParquetReader: which rows each rank gets, in which order, and what it leaves behind."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from error_codes import ends_with
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.base.errors import DataCode, TrainingCode
from horovod.data import AsyncDataLoaderMixin, ParquetReader, services
from horovod.data.parquet.plan import pieces_of

ROWS = 1000


def write(folder: Path, files: list[pa.Table], row_group_size: int = 70) -> str:
    """The tables as Parquet files of a folder, in row groups of 70, so that they end in smaller ones."""
    folder.mkdir(exist_ok=True)
    for number, table in enumerate(files):
        pq.write_table(table, folder / f"part-{number:05}.parquet", row_group_size=row_group_size)
    return str(folder)


def numbered(start: int, stop: int) -> pa.Table:
    """Row i has i, and a list of three values of which each is made from i."""
    numbers = np.arange(start, stop)
    lists = pa.array([[i, 2 * i, 3 * i] for i in numbers], pa.list_(pa.float32()))
    return pa.table({"number": numbers, "list": lists, "text": [f"text {i}" for i in numbers]})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """1,000 rows in four files, one of which has no rows."""
    tables = [numbered(0, 333), numbered(333, 333), numbered(333, 350), numbered(350, ROWS)]
    return write(tmp_path_factory.mktemp("numbered"), tables)


def numbers(reader: Any) -> list[int]:
    return [int(number) for batch in reader for number in batch["number"]]


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 9))
@settings(max_examples=200)
def test_every_row_has_one_rank_whatever_the_row_groups(group_rows: list[int], size: int) -> None:
    first = np.cumsum([0, *group_rows])
    ranks = [pieces_of(group_rows, rank, size) for rank in range(size)]
    rows = [[int(first[p.group]) + row for p in pieces for row in range(p.start, p.stop)] for pieces in ranks]
    assert [row for of_rank in rows for row in of_rank] == list(range(sum(group_rows)))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1
    assert all(piece.start < piece.stop for pieces in ranks for piece in pieces)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("how", [{}, {"workers": 0}, {"shuffle": False}, {"cache": True, "shuffle_rows": 1}], ids=str)
def test_ranks_together_read_every_row_once_an_epoch(path: str, size: int, how: dict[str, Any]) -> None:
    readers = [ParquetReader(path, batch_size=32, rank=rank, size=size, **how) for rank in range(size)]
    for _epoch in range(2):
        by_rank = [numbers(reader) for reader in readers]
        assert sorted(row for rows in by_rank for row in rows) == list(range(ROWS))
        assert [len(rows) for rows in by_rank] == [reader.rows for reader in readers]
        if not how.get("shuffle", True):
            assert [row for rows in by_rank for row in rows] == list(range(ROWS))


def test_rows_stay_whole_and_batches_belong_to_the_caller(path: str) -> None:
    reader = ParquetReader(path, batch_size=64, cache=True, shuffle=False)
    for _epoch in range(2):
        batches = list(reader)
        assert [len(batch["number"]) for batch in batches] == [64] * 15 + [40]
        assert len(batches) == len(reader)
        for batch in batches:
            number = batch["number"]
            np.testing.assert_array_equal(batch["list"], np.outer(number, [1, 2, 3]).astype(np.float32))
            assert batch["text"].tolist() == [f"text {i}" for i in number]
            for array in batch.values():
                array[:] = 0  # neither a row that comes later nor the cache has it


def test_numbers_never_become_objects(tmp_path: Path) -> None:
    count = 100_000
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4.0 * count)), 4).cast(pa.list_(pa.float64()))
    path = write(tmp_path, [pa.table({"number": np.arange(count), "list": lists})], row_group_size=count)
    batches = iter(ParquetReader(path, batch_size=count, workers=0))
    before = sys.getallocatedblocks()
    batch = next(batches)
    assert sys.getallocatedblocks() - before < count / 20
    assert batch["list"].shape == (count, 4)


def test_the_order_is_a_function_of_seed_and_epoch(path: str) -> None:
    undisturbed = ParquetReader(path, ["number"])
    epochs = [numbers(undisturbed) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != sorted(epochs[2])
    resumed = ParquetReader(path, ["number"], workers=3, cache=True)
    resumed.set_epoch(1)
    assert [numbers(resumed), numbers(resumed)] == epochs[1:]
    assert numbers(ParquetReader(path, ["number"], seed=1)) != epochs[0]
    together = ParquetReader(path, ["number"])
    pairs = list(zip(together, together, strict=True))  # two iterations at the same time
    assert [[int(row) for pair in pairs for row in pair[place]["number"]] for place in (0, 1)] == epochs[:2]


@pytest.mark.parametrize("how", [{}, {"epochs": None}, {"shuffle": False}, {"epochs": 3, "workers": 0}], ids=str)
def test_beginning_in_the_middle_of_an_epoch(path: str, how: dict[str, Any]) -> None:
    reader = ParquetReader(path, ["number"], batch_size=30, rank=1, size=2, shuffle_rows=100, **how)
    for skipped in (0, 1, 3, 14, 17, 40):
        reader.set_epoch(2)
        undisturbed = [batch["number"].tolist() for batch in itertools.islice(reader, 45)]
        reader.set_epoch(2, batches=skipped)
        assert [batch["number"].tolist() for batch in itertools.islice(reader, 45 - skipped)] == undisturbed[skipped:]
    assert reader.epoch == 3


def test_rows_of_several_row_groups_are_mixed(path: str) -> None:
    rows = np.array(numbers(ParquetReader(path, ["number"], shuffle_rows=500))[:500])
    assert len(set(rows[:70] // 70)) > 3


def test_an_endless_reader_has_full_batches_and_each_row_once_a_pass(path: str) -> None:
    reader = ParquetReader(path, ["number"], batch_size=64, epochs=None, size=3, rank=1)
    with pytest.raises(TypeError):
        len(reader)
    batches = iter(reader)
    rows = np.concatenate([next(batches)["number"] for _ in range(16)])
    assert len(rows) == 16 * 64
    passes = [sorted(rows[start : start + reader.rows]) for start in (0, reader.rows, 2 * reader.rows)]
    assert passes == [list(range(333, 666))] * 3
    batches.close()  # type: ignore[attr-defined]


def test_several_passes_in_one_iteration(path: str) -> None:
    reader = ParquetReader(path, ["number"], batch_size=64, epochs=2, drop_last=True)
    assert [len(batch["number"]) for batch in reader] == [64] * (2 * ROWS // 64)
    assert len(reader) == 2 * ROWS // 64


def test_more_ranks_than_rows(tmp_path: Path) -> None:
    path = write(tmp_path, [numbered(0, 2)])
    readers = [ParquetReader(path, rank=rank, size=3) for rank in range(3)]
    assert [numbers(reader) for reader in readers] == [[], [0], [1]]
    assert [len(reader) for reader in readers] == [0, 1, 1]
    with pytest.raises(ValueError, match=ends_with(DataCode.NOTHING_TO_REPEAT, "Rank 0 of 3")):
        ParquetReader(path, rank=0, size=3, epochs=None)


def test_a_transformation_gets_each_batch(path: str) -> None:
    def doubled(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"number": 2 * batch["number"]}

    assert sorted(numbers(ParquetReader(path, transformation_fn=doubled))) == list(range(0, 2 * ROWS, 2))
    with pytest.raises(ValueError, match=ends_with(DataCode.INVALID_BATCH, "NoneType")):
        list(ParquetReader(path, transformation_fn=lambda batch: None))  # type: ignore[arg-type, return-value]


def test_in_the_background(path: str) -> None:
    class Reader(AsyncDataLoaderMixin, ParquetReader): ...

    assert numbers(Reader(path=path, async_loader_queue_size=2)) == numbers(ParquetReader(path))


def test_no_thread_outlives_an_iteration(path: str) -> None:
    def threads() -> int:
        return sum(thread.name == "horovod-data-loader" for thread in threading.enumerate())

    for batch in ParquetReader(path, batch_size=1, epochs=None, workers=3):
        assert len(batch["number"]) == 1
        assert threads() == 3
        break
    assert threads() == 0


def test_processes(path: str) -> None:
    """Forked ones read, and such as get the reader pickled, also where connections belong to a process. The exit in the
    middle of an iteration waits for a read over a network. Nothing here needs Spark.
    """
    program = f"""
import os, pickle, sys, threading, time
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem
from horovod.data import ParquetReader

for filesystem in (None, AsyncFileSystemWrapper(target_protocol="file", target_options={{}})):
    reader = ParquetReader({path!r}, ["number"], cache=True, filesystem=filesystem)
    rows = [batch["number"].tolist() for batch in reader]
    begun = iter(reader)
    next(begun)
    pickled = pickle.dumps(reader)
    for copy in (lambda: reader, lambda: pickle.loads(pickled)):
        if (child := os.fork()) == 0:
            reader = copy()
            reader._cached = {{}}
            reader.set_epoch(0)
            os._exit([batch["number"].tolist() for batch in reader] != rows)
        print("the child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

waits = threading.Event()
class File:
    def __init__(self, file):
        self.file = file
    def __getattr__(self, name):
        return getattr(self.file, name)
    def read(self, *size):
        if threading.main_thread() is not threading.current_thread() and is_slow:
            waits.set()
            time.sleep(2)  # longer than the exit waits for any loader
        return self.file.read(*size)
class Slow(LocalFileSystem):
    def _open(self, *args, **kwargs):
        return File(super()._open(*args, **kwargs))

is_slow = False
iterator = iter(ParquetReader({path!r}, batch_size=1, shuffle=False, filesystem=Slow(), epochs=None))
next(iterator)
is_slow = True
while not waits.is_set():
    next(iterator)
print("exits", "pyspark" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)
    assert (done.stdout, done.returncode) == (4 * "the child: 0\n" + "exits False\n", 0), done.stderr
    assert "waits up to 60 s" in done.stderr


def test_a_forked_child_does_not_read_files_that_are_others_now() -> None:
    memory = fsspec.filesystem("memory")

    def write_rows(count: int) -> None:
        sink = pa.BufferOutputStream()
        pq.write_table(numbered(0, count), sink)
        memory.pipe_file("/forked/0.parquet", sink.getvalue().to_pybytes())

    try:
        write_rows(5)
        reader = ParquetReader("memory://forked")
        write_rows(6)
        reader._row_groups._pid = 0  # as in a forked child
        with pytest.raises(OSError, match=ends_with(DataCode.UNREADABLE_DATA, "memory://forked", "changed")):
            list(reader)
    finally:
        memory.rm("/forked", recursive=True)


def test_on_another_file_system(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = MemoryFile.read

    def slow(file: MemoryFile, size: int = -1) -> bytes:
        time.sleep(0.001)  # in which another thread moves the position, where threads share the file
        return bytes(read(file, size))

    monkeypatch.setattr(MemoryFile, "read", slow)
    memory = fsspec.filesystem("memory")
    memory.put(path, "/reader", recursive=True)
    try:
        expected = numbers(ParquetReader(path))
        assert numbers(ParquetReader("memory://reader")) == expected
        assert numbers(ParquetReader("/reader", filesystem=memory)) == expected
        assert numbers(ParquetReader(f"file://{path}")) == expected
    finally:
        memory.rm("/reader", recursive=True)


def test_a_service_that_is_silent(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While files are looked for, and while they are read."""
    answers = threading.Event()
    answers.set()

    def answered(file_system: Any, path: str, *arguments: Any, **options: Any) -> bytes:
        assert answers.wait(60)
        return bytes(AbstractFileSystem.cat_file(file_system, path, *arguments, **options))

    monkeypatch.setattr(MemoryFileSystem, "cat_file", answered)
    memory = fsspec.filesystem("memory")
    memory.put(path, "/silent", recursive=True)
    try:
        reader = ParquetReader("memory://silent")
        answers.clear()
        monkeypatch.setattr(services, "ANSWER_SECONDS", 0.01)
        silent = ends_with(DataCode.UNREADABLE_DATA, "silent", "no answer")
        with pytest.raises(OSError, match=silent):
            list(reader)
        with pytest.raises(OSError, match=silent):
            ParquetReader("memory://silent")
    finally:
        answers.set()
        for thread in threading.enumerate():
            if thread.name == "horovod-data-loader":
                thread.join(60)
        memory.rm("/silent", recursive=True)


def test_files_and_partitions(tmp_path: Path) -> None:
    for day in (1, 2):
        write(tmp_path / f"day={day}", [numbered(10 * day, 10 * day + 5)])
    batch = next(iter(ParquetReader(str(tmp_path), ["day", "number"], shuffle=False)))
    assert batch["day"].tolist() == [1] * 5 + [2] * 5
    files = sorted(str(file) for file in tmp_path.rglob("*.parquet"))
    assert numbers(ParquetReader(files, shuffle=False)) == [*range(10, 15), *range(20, 25)]
    assert numbers(ParquetReader(tmp_path, shuffle=False)) == [*range(10, 15), *range(20, 25)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"rank": 2, "size": 2},
        {"rank": -1},
        {"workers": -1},
        {"epochs": 0.5},
        {"shuffle_rows": True},
        {"columns": "number"},
        {"storage_options": {"key": "x"}, "filesystem": fsspec.filesystem("memory")},
    ],
    ids=", ".join,
)
def test_wrong_arguments(path: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, next(iter(wrong)))):
        ParquetReader(path, **wrong)
