"""Stores: where an estimator keeps the training data, and each run its checkpoints and logs.

Store.create("s3://bucket/experiments")

base.py         Store, the interface; RemoteStore, the part of it that the processes of a training get
filesystem.py   FilesystemStore, on any file system of fsspec; LocalStore; DBFSLocalStore, Databricks
hdfs.py         HDFSStore
files.py        files that are there as a whole, or not at all; the errors of a store that can't be used
publishing.py   data sets of several files that appear all together
"""

from __future__ import annotations

from collections.abc import Callable

from horovod.spark.common.store.base import RemoteStore, Store
from horovod.spark.common.store.filesystem import AbstractFilesystemStore, DBFSLocalStore, FilesystemStore, LocalStore
from horovod.spark.common.store.hdfs import HDFSStore

__all__ = [
    "AbstractFilesystemStore",
    "DBFSLocalStore",
    "FilesystemStore",
    "HDFSStore",
    "LocalStore",
    "RemoteStore",
    "Store",
]


def class_for(prefix_path: str) -> Callable[..., Store]:
    """HDFSStore for hdfs://, DBFSLocalStore for paths of DBFS on Databricks, else FilesystemStore."""
    for store in (HDFSStore, DBFSLocalStore):
        if store.matches(prefix_path):
            return store
    return FilesystemStore


Store._class_for = staticmethod(class_for)  # base.py can't know the classes, which import it
