"""Which class of stores a path means. Store.create asks this; the classes are subclasses of Store."""

from __future__ import annotations

from collections.abc import Callable

from horovod.spark.common.store.base import Store
from horovod.spark.common.store.dbfs import DBFSLocalStore
from horovod.spark.common.store.filesystem import FilesystemStore
from horovod.spark.common.store.hdfs import HDFSStore


def class_for(prefix_path: str) -> Callable[..., Store]:
    """HDFSStore for hdfs://, DBFSLocalStore for paths of DBFS on Databricks, else FilesystemStore."""
    for store in (HDFSStore, DBFSLocalStore):
        if store.matches(prefix_path):
            return store
    return FilesystemStore
