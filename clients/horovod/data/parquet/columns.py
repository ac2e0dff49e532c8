"""Columns of Arrow as arrays of NumPy: no number becomes an object of Python on its way.

    numbers, booleans, dates     (rows,), of the type that they have
    decimals                     (rows,) float64
    text, bytes                  (rows,) objects of str or bytes, one for each distinct value
    lists of one length          (rows, length); lists of lists (rows, length, length)
    vectors of Spark ML          (rows, size) float64, dense or sparse ones
    sparse columns on disk       (rows, size): lists [n, the n indices, the n values, zeros]

Training has no use for a missing value, and takes rows of one shape. So anything else is an error that names the
column, the file and the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from horovod.base.errors import DataCode, coded

Columns = dict[str, np.ndarray]
_VECTOR = ["type", "size", "indices", "values"]  # the fields of Spark ML's vectors; type 0 is sparse, 1 is dense


class Place(NamedTuple):
    """Where values were read, for errors: `first_row` is the row of the file that the column begins with.

    per_row: how many of the values at hand a row has: more than one inside of lists of lists.
    """

    column: str
    path: str
    first_row: int
    per_row: int = 1

    def error(self, code: DataCode, index: int, what: str) -> ValueError:
        """An error about the value at `index`."""
        row = self.first_row + index // self.per_row
        return ValueError(coded(code, f"Column {self.column!r} of {self.path}, row {row}: {what}."))

    def inside(self, length: int) -> Place:
        """The place of the elements of the lists at this place. length: how many elements each list has."""
        return self._replace(per_row=self.per_row * length)


def check_types(schema: pa.Schema, sparse: Mapping[str, int], name: str) -> None:
    """Raises ValueError for a column of the data set `name` that `to_columns` can't take, before anything is read."""
    for column in sparse:
        if column not in schema.names:
            raise ValueError(coded(DataCode.MISSING_COLUMN, f"sparse has a size for {column!r}, which is not read."))
    for field in schema:
        if not _is_supported(field.type) or (field.name in sparse and not _is_list(field.type)):
            said = f"Column {field.name!r} of {name} has the type {field.type}, of which no array can be made"
            said += " as sparse says." if field.name in sparse else "."
            raise ValueError(coded(DataCode.UNSUPPORTED_COLUMN, said))


def to_columns(table: pa.Table, path: str, first_row: int, sparse: Mapping[str, int]) -> Columns:
    """The columns of a table that was read at row `first_row` of the file `path`. `sparse`: the sizes of the columns
    that are sparse on disk.
    """
    columns = {}
    for name in table.column_names:
        place = Place(name, path, first_row)
        array = _one_array(table.column(name))
        columns[name] = _sparse(array, sparse[name], place) if name in sparse else _array(array, place)
    return columns


class Shapes:
    """The shape that the rows of each column have, in all pieces of a reader. Thread-safe."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[tuple[int, ...], str]] = {}

    def check(self, columns: Columns, path: str, first_row: int) -> None:
        """Raises ValueError where rows, read at row `first_row` of `path`, have another shape than those before."""
        for name, array in columns.items():
            shape, other = self._first.setdefault(name, (array.shape[1:], path))
            if shape != array.shape[1:]:
                said = f"values of the shape {array.shape[1:]}, and {other} has ones of the shape {shape}"
                raise Place(name, path, first_row).error(DataCode.DIFFERENT_SHAPES, 0, said)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array  # more text than one array can hold


def _is_list(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_binary(kind) or pt.is_large_binary(kind))


def _is_vector(kind: pa.DataType) -> bool:
    return bool(pt.is_struct(kind)) and [kind.field(i).name for i in range(kind.num_fields)] == _VECTOR


def _is_number(kind: pa.DataType) -> bool:
    numbers = pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind) or pt.is_decimal(kind)
    return bool(numbers or pt.is_date(kind) or pt.is_timestamp(kind) or pt.is_duration(kind))


def _is_supported(kind: pa.DataType) -> bool:
    if _is_list(kind):
        return _is_number(kind.value_type) or (_is_list(kind.value_type) and _is_supported(kind.value_type))
    if pt.is_dictionary(kind):
        return _is_supported(kind.value_type)
    return _is_number(kind) or _is_text(kind) or _is_vector(kind)


def _array(array: pa.Array, place: Place) -> np.ndarray:
    _refuse_nulls(array, place)
    kind = array.type
    if pt.is_dictionary(kind):
        return np.take(_array(array.dictionary, place), _numbers(array.indices), axis=0)
    if _is_text(kind):
        coded_by = array.dictionary_encode()
        distinct = coded_by.dictionary.to_numpy(zero_copy_only=False).astype(object)
        return distinct[_numbers(coded_by.indices)]  # type: ignore[no-any-return]
    if _is_vector(kind):
        return _vectors(array, place)
    if _is_list(kind):
        return _lists(array, place)
    return _numbers(array)


def _numbers(array: pa.Array) -> np.ndarray:
    if pt.is_decimal(array.type):
        array = array.cast(pa.float64())
    return array.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _refuse_nulls(array: pa.Array, place: Place, said: str = "there is no value (null)") -> None:
    if array.null_count:
        raise place.error(DataCode.NULL_VALUE, int(np.argmax(array.is_null().to_numpy(zero_copy_only=False))), said)


def _lists(array: pa.Array, place: Place) -> np.ndarray:
    length = _one_length(_lengths(array), place, "list")
    values, of_values = array.flatten(), place.inside(length)
    _refuse_nulls(values, of_values, "the list holds a null")
    inner = _lists(values, of_values) if _is_list(values.type) else _numbers(values)
    return inner.reshape(len(array), length, *inner.shape[1:])


def _lengths(array: pa.Array) -> np.ndarray:
    if pt.is_fixed_size_list(array.type):
        return np.full(len(array), array.type.list_size, np.int64)
    return np.diff(array.offsets.to_numpy())


def _one_length(lengths: np.ndarray, place: Place, what: str) -> int:
    """The length that all rows have."""
    if not len(lengths):
        return 0
    if (unlike := lengths != lengths[0]).any():
        row = int(np.argmax(unlike))
        said = f"a {what} of {lengths[row]} values, but earlier rows have {lengths[0]} values"
        raise place.error(DataCode.DIFFERENT_SHAPES, row, said)
    return int(lengths[0])


def _vectors(array: pa.Array, place: Place) -> np.ndarray:
    """Vectors of Spark ML, of which each row says whether it is dense; a dense one has no size and no indices."""
    kinds, values = pc.struct_field(array, "type"), pc.struct_field(array, "values")
    for part in (kinds, values):
        _refuse_nulls(part, place, "a vector has no type or no values (null)")
    is_sparse = _numbers(kinds) == 0
    counts = _lengths(values)
    sizes = np.where(is_sparse, _numbers(pc.fill_null(pc.struct_field(array, "size"), 0)), counts)
    size = _one_length(sizes, place, "vector")
    rows, places = _rows_and_places(counts)
    flat = values.flatten()
    if flat.null_count:
        row = int(rows[np.argmax(flat.is_null().to_numpy(zero_copy_only=False))])
        raise place.error(DataCode.NULL_VALUE, row, "the vector holds a null")
    if not is_sparse.any():
        return _numbers(flat).reshape(len(array), size)
    indices = pc.struct_field(array, "indices")
    unlike = is_sparse & (_numbers(pc.fill_null(pc.list_value_length(indices), 0)) != counts)
    if unlike.any():
        row = int(np.argmax(unlike))
        said = f"a sparse vector of {counts[row]} values has another number of indices"
        raise place.error(DataCode.DIFFERENT_SHAPES, row, said)
    places[is_sparse[rows]] = _numbers(indices.filter(pa.array(is_sparse)).flatten())
    return _scattered(rows, places, _numbers(flat), (len(array), size), place)


def _sparse(array: pa.Array, size: int, place: Place) -> np.ndarray:
    """Lists [n, the n indices, the n values, zeros up to one length] as dense rows."""
    packed = _array(array, place)
    if not packed.size:
        return np.zeros((len(packed), size), packed.dtype)
    counts = packed[:, 0].astype(np.int64)
    if (wrong := (counts < 0) | (1 + 2 * counts > packed.shape[1])).any():
        row = int(np.argmax(wrong))
        said = f"the list begins with {packed[row, 0]}, which is no number of values that fits into it"
        raise place.error(DataCode.DIFFERENT_SHAPES, row, said)
    rows, places = _rows_and_places(counts)
    indices = packed[rows, 1 + places].astype(np.int64)
    return _scattered(rows, indices, packed[rows, 1 + counts[rows] + places], (len(packed), size), place)


def _rows_and_places(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each of sum(counts) values its row, and its place among those of the row."""
    rows = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return rows, np.arange(len(rows)) - first[rows]


def _scattered(
    rows: np.ndarray, places: np.ndarray, values: np.ndarray, shape: tuple[int, int], place: Place
) -> np.ndarray:
    if (outside := (places < 0) | (places >= shape[1])).any():
        which = int(np.argmax(outside))
        said = f"a sparse vector of {shape[1]} values has one at {places[which]}"
        raise place.error(DataCode.DIFFERENT_SHAPES, int(rows[which]), said)
    dense: Any = np.zeros(shape, values.dtype)
    dense[rows, places] = values
    return dense  # type: ignore[no-any-return]


# -- from decoded pieces to batches ------------------------------------------------------------------------------------
# The pieces of a window are joined, in another order of rows, and cut into batches.


def rows_in(columns: Columns) -> int:
    """How many rows the arrays have."""
    return len(next(iter(columns.values()), ()))


def joined(pieces: Sequence[Columns], order: np.ndarray | None = None) -> Columns:
    """The rows of all pieces, in this order, in new memory."""
    together = {}
    for name in pieces[0]:
        arrays = [piece[name] for piece in pieces]
        if order is None:
            together[name] = np.concatenate(arrays)
        else:
            together[name] = np.take(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), order, axis=0)
    return together


class Batches:
    """Cuts windows into batches of one size. Rows that are left of a window are the first of the next batch."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._left: Columns = {}

    def of(self, window: Columns) -> Iterator[Columns]:
        """The full batches that are there with the rows of `window`."""
        first = 0
        if rows_in(self._left):
            first = min(self._size - rows_in(self._left), rows_in(window))
            self._left = joined([self._left, cut(window, 0, first)])
            if rows_in(self._left) < self._size:
                return
            yield self._left
            self._left = {}
        last = rows_in(window) - (rows_in(window) - first) % self._size
        for start in range(first, last, self._size):
            yield cut(window, start, start + self._size)
        self._left = cut(window, last, rows_in(window))

    def rest(self) -> Iterator[Columns]:
        """The rows that are left, as one smaller batch, if there are any."""
        if rows_in(self._left):
            yield self._left


def cut(columns: Columns, start: int, stop: int) -> Columns:
    """The rows from `start` to `stop`, in the same memory."""
    return {name: array[start:stop] for name, array in columns.items()}
