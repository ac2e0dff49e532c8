"""Store: the place that holds the data and runs of an estimator, as estimators ask it."""

from __future__ import annotations

import base64
import importlib
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass
class RemoteStore:
    """The store of one training, seen from its processes. Pickled for them, so all of it can be."""

    train_data_path: str
    val_data_path: str
    test_data_path: str
    saving_runs: bool
    runs_path: str
    run_path: str
    checkpoint_path: str | None
    logs_path: str | None
    checkpoint_filename: str
    logs_subdir: str
    get_local_output_dir: Callable[[], AbstractContextManager[str]]  # with get_local_output_dir() as folder: ...
    sync: Callable[[str], None]  # sync(folder) brings the files that have changed in a local folder to run_path
    storage_options: dict[str, Any]  # for ParquetReader, to read the data paths


Sync = Callable[[str], None]
LocalOutputDir = Callable[[], AbstractContextManager[str]]


class Store(ABC):
    """The paths of the data sets and runs of an estimator, and the files at them.

    A run has the id `run_id`, and below `get_run_path(run_id)` its checkpoint and its logs. Paths are URLs, which Spark
    and `horovod.data.ParquetReader` read. A file that is written is there as a whole or not at all.

    Arguments of the methods:
    path: a URL, in the store or elsewhere.
    run_id: the name of a run.
    idx, dataset_idx: the number of a data frame among several, or None.
    content, text: the whole content of the file.
    """

    _class_for: ClassVar[Callable[[str], Callable[..., Store]]]  # of a path

    @staticmethod
    def create(prefix_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Store:
        """The store for a path: HDFSStore for hdfs://, DBFSLocalStore for paths of DBFS on Databricks, else
        FilesystemStore.

        prefix_path: the folder of the store. Further arguments are those of its class.

        >>> Store.create("/tmp/experiments").get_run_path("first")
        'file:///tmp/experiments/runs/first'
        """
        path = os.fspath(prefix_path)
        return Store._class_for(path)(path, *args, **kwargs)

    @abstractmethod
    def is_parquet_dataset(self, path: str) -> bool:
        """Whether there are Parquet files at `path`. OSError when the file system can't be asked."""

    @abstractmethod
    def get_parquet_dataset(self, path: str) -> Any:
        """The pyarrow.parquet.ParquetDataset at `path`. OSError if there is none."""

    @abstractmethod
    def get_train_data_path(self, idx: int | None = None) -> str:
        """Where training data is; with `idx` that of one data frame among several."""

    @abstractmethod
    def get_val_data_path(self, idx: int | None = None) -> str:
        """Where validation data is; with `idx` that of one data frame among several."""

    @abstractmethod
    def get_test_data_path(self, idx: int | None = None) -> str:
        """Where test data is; with `idx` that of one data frame among several."""

    @abstractmethod
    def saving_runs(self) -> bool:
        """Whether checkpoints and logs are kept."""

    @abstractmethod
    def get_runs_path(self) -> str:
        """The folder of all runs."""

    @abstractmethod
    def get_run_path(self, run_id: str) -> str:
        """The folder of one run."""

    @abstractmethod
    def get_checkpoint_path(self, run_id: str) -> str | None:
        """The file of the run's last checkpoint; None where runs are not saved."""

    @abstractmethod
    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """The files of a run whose name ends with `suffix`, in the order of their names; none if there is no run.

        suffix: the end of the files' names.
        """

    @abstractmethod
    def get_logs_path(self, run_id: str) -> str | None:
        """The folder of the run's logs; None where runs are not saved."""

    @abstractmethod
    def get_checkpoint_filename(self) -> str:
        """The name of the checkpoint below the folder of the run."""

    @abstractmethod
    def get_logs_subdir(self) -> str:
        """The name of the folder of logs below the folder of the run."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file or folder at `path`. OSError when the file system can't be asked, or has no such
        bucket: a run whose checkpoint can't be seen would begin again, and overwrite it.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The content of a file. FileNotFoundError if there is none."""

    @abstractmethod
    def write(self, path: str, content: bytes) -> None:
        """Writes a file as a whole, in place of one that is there."""

    def write_text(self, path: str, text: str) -> None:
        """Writes a text as UTF-8, as `write` does."""
        self.write(path, text.encode())

    def read_serialized_keras_model(self, ckpt_path: str, model: Any, custom_objects: dict[str, Any] | None) -> str:
        """A checkpoint of KerasEstimator as text: base64 of the pickled bytes of an HDF5 file.

        >>> content = pickle.loads(base64.b64decode(store.read_serialized_keras_model(path, model, {})))
        >>> Path("model.h5").write_bytes(content)

        Args:
            ckpt_path: the file, as of get_checkpoint_path(run_id).
            model: any model of the Keras that has written it, Keras 3 or tf_keras.
            custom_objects: classes and functions that the model uses, by their names.
        """
        from horovod.spark.keras.util import to_hdf5  # late: other frameworks use stores without Keras

        return base64.b64encode(pickle.dumps(to_hdf5(self.read(ckpt_path), model, custom_objects))).decode()

    @abstractmethod
    def get_local_output_dir_fn(self, run_id: str) -> LocalOutputDir:
        """A function for the processes of a training: it makes a folder on their host, as a context manager that yields
        its path and removes it.
        """

    @abstractmethod
    def sync_fn(self, run_id: str) -> Sync:
        """A function for the processes of a training: it brings the files of a local folder that are new or have
        changed since its last call to the folder of the run.
        """

    def to_remote(self, run_id: str, dataset_idx: int | None) -> RemoteStore:
        """The part of this store that the processes of the training `run_id` need; it can be pickled."""
        saves = self.saving_runs()
        return RemoteStore(
            train_data_path=self.get_train_data_path(dataset_idx),
            val_data_path=self.get_val_data_path(dataset_idx),
            test_data_path=self.get_test_data_path(dataset_idx),
            saving_runs=saves,
            runs_path=self.get_runs_path(),
            run_path=self.get_run_path(run_id),
            checkpoint_path=self.get_checkpoint_path(run_id),
            logs_path=self.get_logs_path(run_id),
            checkpoint_filename=self.get_checkpoint_filename(),
            logs_subdir=self.get_logs_subdir(),
            get_local_output_dir=self.get_local_output_dir_fn(run_id),
            sync=self.sync_fn(run_id),
            storage_options=self.get_storage_options(),
        )

    def get_storage_options(self) -> dict[str, Any]:
        """The options that fsspec needs in addition to the URLs of this store."""
        return {}


def import_parquet() -> Any:
    """pyarrow.parquet, which loads slowly and which not every use of a store needs."""
    return importlib.import_module("pyarrow.parquet")
