"""A DataFrame as Parquet files in a store: by Spark's own writer, or by Python where Spark has no file system for it.

Spark reaches s3a://, gs:// or abfs:// with jars of its own, which many installations lack, while the store needs no
more than a package of fsspec. Whether Spark has a file system for a URL it says itself, before a job begins, when it is
asked to write there. If it has none, its tasks write the files with the store (partition_files.py) into a folder that
readers leave out, and the driver publishes those of the attempts that count, once the job has succeeded.
"""

from __future__ import annotations

import contextlib
import functools
import re
from dataclasses import dataclass
from typing import Any, Final

import cloudpickle
from pyspark.sql import DataFrame

from horovod.base.errors import DataCode, code_of, without_code
from horovod.spark.common.store.failures import asked, failed
from horovod.spark.common.store.filesystem import AbstractFilesystemStore
from horovod.spark.common.store.publishing import discard, publish, staging_name

_TIMESTAMPS: Final = "spark.sql.parquet.outputTimestampType"
# What Hadoop says of a scheme that it knows no class for, and of one whose class is in a jar that is not there.
_NO_FILE_SYSTEM: Final = re.compile(
    r"No FileSystem for scheme|ClassNotFoundException: Class [\w.$]*FileSystem[\w.$]* not found"
)
# What Java, Hadoop and object stores say when they refuse to write.
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
    from horovod.spark.common.partition_files import SCHEMA, write_partition  # which needs pyarrow

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
    """By the footers of the files, so exactly, and without reading data."""
    rows = total_bytes = 0
    dataset = store.get_parquet_dataset(path)
    with asked(path):
        for fragment in dataset.fragments:
            for group in fragment.row_groups:
                rows += group.num_rows
                total_bytes += group.total_byte_size
    return Written(rows, total_bytes / rows if rows else 0.0)
