"""What ParquetReader makes of each type of column, and what it says of values that no batch can hold."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from error_codes import ends_with

from horovod.base.errors import DataCode
from horovod.data import ParquetReader

# As Spark writes its ML vectors: a dense one has neither size nor indices.
VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)
NESTED = pa.list_(pa.list_(pa.int64()))


def dense(*values: float) -> dict[str, Any]:
    return {"type": 1, "size": None, "indices": None, "values": list(values)}


def sparse(size: int, at: dict[int, float]) -> dict[str, Any]:
    return {"type": 0, "size": size, "indices": list(at), "values": list(at.values())}


def reader(folder: Path, *parts: list[Any], kind: pa.DataType | None = None, **how: Any) -> ParquetReader:
    """Of the column `x`, each part in a file of its own, in row groups of two rows; not shuffled."""
    for number, values in enumerate(parts):
        table = pa.table({"x": pa.array(values, kind)})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=2)
    return ParquetReader(str(folder), shuffle=False, **how)


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (pa.int8(), [1, 2, 3], np.array([1, 2, 3], np.int8)),
        (pa.float32(), [1.5, float("nan"), 3], np.array([1.5, np.nan, 3], np.float32)),
        (pa.bool_(), [True, False, True], np.array([True, False, True])),
        (pa.decimal128(10, 2), [Decimal("1.25"), Decimal("-3"), Decimal("0")], np.array([1.25, -3, 0])),
        (pa.date32(), [datetime.date(2026, 1, day) for day in (1, 2, 3)], np.arange("2026-01-01", 3, dtype="M8[D]")),
        (pa.string(), ["a", "ü", "a"], np.array(["a", "ü", "a"], object)),
        (pa.large_binary(), [b"a", b"", b"c"], np.array([b"a", b"", b"c"], object)),
        (pa.dictionary(pa.int32(), pa.string()), ["a", "b", "a"], np.array(["a", "b", "a"], object)),
        (pa.list_(pa.float32()), [[1, 2], [3, 4], [5, 6]], np.array([[1, 2], [3, 4], [5, 6]], np.float32)),
        (pa.list_(pa.int64(), 2), [[1, 2], [3, 4], [5, 6]], np.array([[1, 2], [3, 4], [5, 6]])),
        (pa.list_(pa.list_(pa.int64())), [[[1, 2, 3], [4, 5, 6]]] * 3, np.array([[[1, 2, 3], [4, 5, 6]]] * 3)),
        (pa.large_list(pa.bool_()), [[], [], []], np.zeros((3, 0), bool)),
        (VECTOR, [dense(1, 2)] * 3, np.array([[1.0, 2]] * 3)),
        (
            VECTOR,
            [sparse(3, {0: 1, 2: 5}), dense(7, 8, 9), sparse(3, {})],
            np.array([[1.0, 0, 5], [7, 8, 9], [0, 0, 0]]),
        ),
    ],
    ids=str,
)
def test_types(tmp_path: Path, kind: pa.DataType, values: list[Any], expected: np.ndarray) -> None:
    (batch,) = reader(tmp_path, values, kind=kind)
    np.testing.assert_array_equal(batch["x"], expected)
    assert batch["x"].dtype == expected.dtype
    (second,) = ParquetReader(str(tmp_path), shuffle=False, rank=1, size=3)  # the second row of a row group
    np.testing.assert_array_equal(second["x"], expected[1:2])


def test_sparse_lists_become_dense_rows(tmp_path: Path) -> None:
    packed = [[2, 0, 3, 1.5, 2.5, 0, 0], [0] * 7, [3, 4, 1, 2, 7, 8, 9], [1, 2, 6, 0, 0, 0, 0]]
    expected = [[1.5, 0, 0, 2.5, 0], [0, 0, 0, 0, 0], [0, 8, 9, 0, 7], [0, 0, 6, 0, 0]]
    (batch,) = reader(tmp_path, packed, kind=pa.list_(pa.float64()), sparse={"x": 5})
    np.testing.assert_array_equal(batch["x"], expected)


@pytest.mark.parametrize(
    ("kind", "parts", "how", "code", "facts"),
    [
        (pa.int64(), [[1, 2], [3, 4, 5, None]], {}, DataCode.NULL_VALUE, ["1.parquet", "row 3"]),
        (pa.list_(pa.int64()), [[[1], [2], [3], None]], {}, DataCode.NULL_VALUE, ["0.parquet", "row 3"]),
        (pa.list_(pa.int64()), [[[1, 2], [2, 3], [4, None]]], {}, DataCode.NULL_VALUE, ["0.parquet", "row 2"]),
        (NESTED, [[[[1], [2]], [[3], [4]], [[5], [None]]]], {}, DataCode.NULL_VALUE, ["row 2"]),
        (NESTED, [[[[1], [2]], [[3], [4]], [[5], None]]], {}, DataCode.NULL_VALUE, ["row 2"]),
        (NESTED, [[[[1], [2]], [[3], [4, 5]]]], {}, DataCode.DIFFERENT_SHAPES, ["row 1", 2, 1]),
        (VECTOR, [[dense(1), None]], {}, DataCode.NULL_VALUE, ["0.parquet", "row 1"]),
        (VECTOR, [[dense(1), {**dense(1), "type": None}]], {}, DataCode.NULL_VALUE, ["row 1"]),
        (VECTOR, [[dense(1), {**dense(1), "values": None}]], {}, DataCode.NULL_VALUE, ["row 1"]),
        (VECTOR, [[dense(1, 2), {**dense(1), "values": [1, None]}]], {}, DataCode.NULL_VALUE, ["row 1"]),
        (VECTOR, [[dense(1), {**sparse(1, {0: 1}), "indices": None}]], {}, DataCode.DIFFERENT_SHAPES, ["row 1"]),
        (
            VECTOR,
            [[sparse(3, {0: 1}), {**sparse(3, {0: 1}), "indices": [1, 2]}]],
            {},
            DataCode.DIFFERENT_SHAPES,
            ["row 1"],
        ),
        (pa.list_(pa.int64()), [[[1], [2], [3], [4, 5]]], {}, DataCode.DIFFERENT_SHAPES, ["row 3", 2, 1]),
        (pa.list_(pa.int64()), [[[1], [2]], [[3, 4]]], {"workers": 0}, DataCode.DIFFERENT_SHAPES, ["1.parquet"]),
        (VECTOR, [[dense(1, 2), sparse(3, {0: 1})]], {}, DataCode.DIFFERENT_SHAPES, ["row 1", 3, 2]),
        (VECTOR, [[sparse(3, {0: 1}), sparse(3, {3: 1})]], {}, DataCode.DIFFERENT_SHAPES, ["row 1"]),
        (pa.list_(pa.int64()), [[[0, 0, 0], [2, 1, 0]]], {"sparse": {"x": 9}}, DataCode.DIFFERENT_SHAPES, ["row 1", 2]),
        (pa.list_(pa.int64()), [[[1, 9, 4]]], {"sparse": {"x": 9}}, DataCode.DIFFERENT_SHAPES, ["row 0", 9]),
    ],
    ids=str,
)
def test_values_that_no_batch_can_hold(
    tmp_path: Path, kind: pa.DataType, parts: list[list[Any]], how: dict[str, Any], code: DataCode, facts: list[Any]
) -> None:
    read = reader(tmp_path, *parts, kind=kind, **how)
    with pytest.raises(ValueError, match=ends_with(code, "'x'", *facts)):
        list(read)


@pytest.mark.parametrize("kind", [pa.null(), pa.list_(pa.string()), pa.map_(pa.string(), pa.int64())], ids=str)
def test_types_without_arrays_are_refused_before_reading(tmp_path: Path, kind: pa.DataType) -> None:
    with pytest.raises(ValueError, match=ends_with(DataCode.UNSUPPORTED_COLUMN, "'x'", str(kind).split("<")[0])):
        reader(tmp_path, [None], kind=kind)
    with pytest.raises(ValueError, match=ends_with(DataCode.UNSUPPORTED_COLUMN, "'x'", "sparse")):
        reader(tmp_path, [1], kind=pa.int64(), sparse={"x": 3})


def test_missing_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1], "y": [2]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "1.parquet")
    path = str(tmp_path)
    for columns, facts in ((["z"], [path, "'z'"]), (None, ["1.parquet", "'y'"]), ([], [path])):
        with pytest.raises(ValueError, match=ends_with(DataCode.MISSING_COLUMN, *facts)):
            ParquetReader(path, columns)
    with pytest.raises(ValueError, match=ends_with(DataCode.MISSING_COLUMN, "'y'")):
        ParquetReader(path, ["x"], sparse={"y": 3})
    assert ParquetReader(path, ["x"]).rows == 2


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=ends_with(DataCode.UNREADABLE_DATA)):
        ParquetReader([])
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(OSError, match=ends_with(DataCode.UNREADABLE_DATA, path)):
            ParquetReader(str(path))
    with pytest.raises(OSError, match=ends_with(DataCode.UNREADABLE_DATA, "nosuch")):
        ParquetReader("nosuch://bucket/path")
    with pytest.raises(ImportError, match=ends_with(DataCode.MISSING_DATA_PACKAGE, "dropbox")):
        ParquetReader("dropbox://path")
    read = reader(tmp_path, [1, 2, 3])
    (tmp_path / "0.parquet").rename(tmp_path / "gone")
    with pytest.raises(OSError, match=ends_with(DataCode.UNREADABLE_DATA, "0.parquet")):
        list(read)
    (tmp_path / "0.parquet").write_bytes(b"no Parquet")
    with pytest.raises(OSError, match=ends_with(DataCode.UNREADABLE_DATA)):
        ParquetReader(str(tmp_path))
