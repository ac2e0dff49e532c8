"""What a task of Spark does with its partition where Spark has no file system for the store: Parquet files, written by
Arrow and uploaded by fsspec.

Each file is encoded in memory and uploaded in one call, so it is there as a whole or not at all, and each call has a
deadline (store/failures.py). No two attempts of a task choose the same name, so an attempt that failed, or is still
running somewhere, changes nothing of what another one wrote. The task returns the names of its files; those of the
attempt that Spark takes are the data set (data_files.py).

Types are those of the files that Spark itself writes: no schema of Arrow beside that of Parquet, and times of the kind
that Spark is told to write.
"""

from __future__ import annotations

import io
import pickle
import uuid
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext

# Of values in memory. A rank reads whole row groups, and holds several.
ROW_GROUP_BYTES: Final = 16 << 20
# Encoded. A task holds one file and one row group. s3fs uploads so much in one request.
FILE_BYTES: Final = 64 << 20
SCHEMA: Final = "name string, rows long, bytes long"


def write_partition(pickled: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields a row of SCHEMA for each file. pickled: the store, the URL of the folder to write to, and how times are
    written (spark.sql.parquet.outputTimestampType).
    """
    store, folder, timestamps = pickle.loads(pickled)  # noqa: S301 - what the driver of the same program has sent
    context = TaskContext.get()
    partition = context.partitionId() if context is not None else 0
    prefix = f"part-{partition:05d}-{uuid.uuid4().hex}"  # by name in the order of the partitions
    for number, (content, rows) in enumerate(encoded(batches, timestamps)):
        name = f"{prefix}-{number:05d}.snappy.parquet"
        store.write(f"{folder}/{name}", content)
        yield pa.RecordBatch.from_arrays(
            [pa.array([name]), pa.array([rows], pa.int64()), pa.array([len(content)], pa.int64())],
            names=["name", "rows", "bytes"],
        )


def encoded(batches: Iterator[pa.RecordBatch], timestamps: str) -> Iterator[tuple[bytes, int]]:
    """The content of one Parquet file after another, and its rows."""
    groups = _row_groups(batches)
    for first in groups:
        sink = io.BytesIO()
        rows = 0
        with pq.ParquetWriter(sink, first.schema, store_schema=False, **_options(timestamps)) as writer:
            group = first
            while group is not None:
                writer.write_table(group, row_group_size=group.num_rows)
                rows += group.num_rows
                group = next(groups, None) if sink.tell() < FILE_BYTES else None
        yield sink.getvalue(), rows


def _options(timestamps: str) -> dict[str, Any]:
    if timestamps == "INT96":
        return {"use_deprecated_int96_timestamps": True}
    if timestamps == "TIMESTAMP_MILLIS":
        return {"coerce_timestamps": "ms", "allow_truncated_timestamps": True}
    return {}  # Spark's values are microseconds


def _row_groups(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows in pieces of about ROW_GROUP_BYTES."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        for piece in _pieces(batch):
            waiting.append(piece)
            if sum(one.nbytes for one in waiting) >= ROW_GROUP_BYTES:
                yield pa.Table.from_batches(waiting)
                waiting = []
    if waiting:
        yield pa.Table.from_batches(waiting)


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    rows = max(1, ROW_GROUP_BYTES * batch.num_rows // max(1, batch.nbytes))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)
