"""Stores: where an estimator keeps the training data, and each run its checkpoints and logs.

Store.create("s3://bucket/experiments")

base.py         Store, the interface
create.py       which class Store.create makes
filesystem.py   FilesystemStore, on any file system of fsspec; LocalStore
hdfs.py         HDFSStore
dbfs.py         DBFSLocalStore, Databricks
remote.py       what the processes of a training get of a store
failures.py     what a store raises that can't be used
writing.py      files that are there as a whole, or not at all
publishing.py   data sets of several files that appear all together
"""

from horovod.spark.common.store.base import Store, choose_by
from horovod.spark.common.store.create import class_for
from horovod.spark.common.store.dbfs import DBFSLocalStore
from horovod.spark.common.store.filesystem import AbstractFilesystemStore, FilesystemStore, LocalStore
from horovod.spark.common.store.hdfs import HDFSStore
from horovod.spark.common.store.remote import RemoteStore

__all__ = [
    "AbstractFilesystemStore",
    "DBFSLocalStore",
    "FilesystemStore",
    "HDFSStore",
    "LocalStore",
    "RemoteStore",
    "Store",
]

choose_by(class_for)
