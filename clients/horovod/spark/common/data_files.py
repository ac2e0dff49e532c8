"""A DataFrame as Parquet files in a store: by Spark's own writer, or by Python where Spark has no file system for it.

Spark reaches s3a://, gs:// or abfs:// with jars of its own, which many installations lack, while the store needs no
more than a package of fsspec. Whether Spark has a file system for a URL it says itself, before a job begins, when it is
asked to write there. If it has none, its tasks write the files with the store into a folder that readers leave out, and
the driver publishes those of the attempts that count, once the job has succeeded.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import cloudpickle
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from horovod.base.errors import DataCode, code_of, without_code
from horovod.spark.common.store.base import import_parquet
from horovod.spark.common.store.files import asked, failed
from horovod.spark.common.store.filesystem import AbstractFilesystemStore
from horovod.spark.common.store.publishing import discard, publish, staging_name

_TIMESTAMPS: Final = "spark.sql.parquet.outputTimestampType"
# Hadoop's words for a scheme that it knows no class for, and for one whose class is in a jar that is not there.
_NO_FILE_SYSTEM: Final = re.compile(
    r"No FileSystem for scheme|ClassNotFoundException: Class [\w.$]*FileSystem[\w.$]* not found"
)
# The words of Java, Hadoop and object stores when they refuse to write.
_REFUSED: Final = re.compile(
    r"AccessControlException|AccessDenied|Mkdirs failed|No space left on device|Permission denied|Read-only file system"
)
_CLASSES: Final = re.compile(r"^(?:Caused by: |: )?(?:\(?(?:[\w$]+\.)+[\w$]+(?:: |\) ))*")  # names of exceptions
_RAISED: Final = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt)): (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Written:
    """Rows of a Parquet data set, and bytes of a row before compression."""

    rows: int
    row_bytes: float


def write(df: DataFrame, path: str, store: Any, verbose: int = 0) -> Written:
    """Writes the rows of `df` as Parquet files to the URL `path` of the store, and removes the files that were there.

    Raises:
        OSError: Spark has no file system for the URL, and its tasks or the driver can't write there either.
    """
    if _is_written_by_spark(df, path, store):
        return count_rows(store, path)
    if verbose:
        print(f"horovod.spark: Spark has no file system for {_scheme(path)}; its tasks write by fsspec", flush=True)
    rows = _write_by_tasks(df, path, store)
    found = count_rows(store, path) if rows else Written(0, 0.0)
    if found.rows != rows:
        raise failed(path, f"{rows} rows were written there, and now it has {found.rows}")
    return found


def _is_written_by_spark(df: DataFrame, path: str, store: Any) -> bool:
    try:
        df.write.mode("overwrite").parquet(path)
    except Exception as error:
        if isinstance(store, AbstractFilesystemStore) and is_without_file_system(str(error)):
            return False
        if refusal := refused_by_file_system(str(error)):
            raise failed(path, f"Spark can't write there: {refusal}") from error
        raise
    return True


def is_without_file_system(text: str) -> bool:
    """Whether an error of Spark's writer says that Spark has no file system for the URL. text: the error. Pure."""
    return _NO_FILE_SYSTEM.search(text) is not None


def refused_by_file_system(text: str) -> str:
    """The line of an error of Spark's writer that says why a file system refuses; "" if it failed for another reason,
    as code of the program does. text: the error. Pure.
    """
    found = next((line for line in text.splitlines() if _REFUSED.search(line)), "")
    return _CLASSES.sub("", found.strip()).rstrip(".")


def _write_by_tasks(df: DataFrame, path: str, store: AbstractFilesystemStore) -> int:
    """How many rows the data set at `path` has now."""

    store.exists(path)  # a bucket that is not there, or refuses, is an error before Spark has computed anything
    filesystem, folder, staging = store.fs, store.get_localized_path(path), staging_name()
    # Pickled here, so that classes that programs have registered with cloudpickle travel as they should.
    order = cloudpickle.dumps((store, f"{path}/{staging}", df.sparkSession.conf.get(_TIMESTAMPS)))
    try:
        try:
            files = df.mapInArrow(functools.partial(write_partition, order), SCHEMA).collect()
        except Exception as error:
            if (failure := task_failed(path, str(error))) is None:
                raise
            raise failure from error
        with asked(path):
            publish(filesystem, folder, staging, {file["name"]: file["bytes"] for file in files})
        return sum(file["rows"] for file in files)
    finally:
        with contextlib.suppress(Exception):  # what stays there is left out by readers, and removed by the next writer
            discard(filesystem, f"{folder}/{staging}")


def task_failed(path: str, text: str) -> OSError | None:
    """The error for tasks that can't write to a URL; None where they failed for another reason, as code of the program
    does. text: what Spark raised, with the traceback of a task. Pure.
    """
    for kind, said in _RAISED.findall(text):
        is_missing = kind in ("ImportError", "ModuleNotFoundError")
        if is_missing or code_of(said) is DataCode.DATA_STORE_FAILED:
            reason = f"Spark has no file system for {_scheme(path)}, so its tasks write by fsspec, and one failed: "
            reason += f"{kind}: {without_code(said)}"
            if is_missing:
                reason = f"{reason.rstrip('.')}. Install it for the Python of all executors"
            return failed(path, reason)
    return None


def _scheme(path: str) -> str:
    return f"{path.partition('://')[0]}://"


def count_rows(store: Any, path: str) -> Written:
    """The rows of a data set by the footers of its files: exactly, and without reading data."""
    rows = total_bytes = 0
    dataset = store.get_parquet_dataset(path)
    with asked(path):
        for fragment in dataset.fragments:
            for group in fragment.row_groups:
                rows += group.num_rows
                total_bytes += group.total_byte_size
    return Written(rows, total_bytes / rows if rows else 0.0)


# -- in a task of Spark, if Spark has no file system for the store -----------------------------------------------------
#
# Each file is encoded in memory and uploaded in one call, so it is there as a whole or not at all, and each call has a
# deadline (store/files.py). No two attempts of a task choose the same name, so an attempt that failed, or is still
# running somewhere, changes nothing of what another one wrote. The task returns the names of its files; those of the
# attempt that Spark takes are the data set.
#
# Types are those of the files that Spark itself writes: no schema of Arrow beside that of Parquet, and times of the
# kind that Spark is told to write.

# Size of the values of a row group in memory. A rank reads whole row groups, and holds several.
ROW_GROUP_BYTES: Final = 16 << 20
# Size of an encoded file. A task holds one file and one row group. s3fs uploads so much in one request.
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
        with import_parquet().ParquetWriter(sink, first.schema, store_schema=False, **_options(timestamps)) as writer:
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
