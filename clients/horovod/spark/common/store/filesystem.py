"""FilesystemStore, a store on any file system that fsspec knows; and DBFSLocalStore, on that of Databricks, which every
node has as the folder /dbfs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from horovod.base.errors import DataCode, coded
from horovod.spark.common.store.base import LocalOutputDir, Store, Sync, import_parquet
from horovod.spark.common.store.files import (
    FolderSync,
    asked,
    bucket_of,
    call,
    failed,
    local_output_dir,
    names_of,
    read_file,
    write_file,
)

_CHECKPOINT, _LOGS = "checkpoint", "logs"
_MAGIC = b"PAR1"  # the first and the last four bytes of a Parquet file


class AbstractFilesystemStore(Store):
    """The paths of a store below one prefix. Subclasses say what a path looks like and which file system it is on.

    Args:
        prefix_path: the folder for all files that no other argument places elsewhere.
        train_path, val_path, test_path: where data is; None: intermediate_train_data and so on below the prefix.
        runs_path: where runs are; None: `runs` below the prefix.
        save_runs: False: no checkpoints and logs are kept.
        storage_options: options of fsspec, such as credentials.
        checkpoint_filename: the name of a run's checkpoint in its folder; None: "checkpoint".
    """

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        self.storage_options = dict(storage_options or {})
        self.prefix_path = self.get_full_path(prefix_path)
        self._train_path = self._place(train_path, "intermediate_train_data")
        self._val_path = self._place(val_path, "intermediate_val_data")
        self._test_path = self._place(test_path, "intermediate_test_data")
        self._runs_path = self._place(runs_path, "runs")
        self._save_runs = save_runs
        self._checkpoint_filename = checkpoint_filename or _CHECKPOINT
        self._buckets: set[str] = set()  # that are known to be there
        self._fs: Any = None
        self._pid = os.getpid()  # whose _fs it is

    def _place(self, path: str | None, name: str) -> str:
        return _join(self.prefix_path, name) if path is None else self.get_full_path(path)

    @abstractmethod
    def get_full_path(self, path: str) -> str:
        """The URL of a path."""

    def get_localized_path(self, path: str) -> str:
        """The path or URL as the file system of this store writes it."""
        return str(self.fs._strip_protocol(path))

    @property
    def fs(self) -> Any:
        """The fsspec file system, made at its first use, and again in a forked child: most can't share connections.
        It may remember the contents of folders, which others change: call `invalidate_cache()` before you list one.
        """
        if self._fs is None or self._pid != os.getpid():
            self._fs, self._pid = self._make_fs(), os.getpid()
        return self._fs

    @abstractmethod
    def _make_fs(self) -> Any:
        """The fsspec file system."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fs": None}  # connections stay where they are

    def get_storage_options(self) -> dict[str, Any]:
        return self.storage_options

    def is_parquet_dataset(self, path: str) -> bool:
        if not self.exists(path):
            return False
        filesystem, folder = self.fs, self.get_localized_path(path)
        with asked(path):
            for name, about in sorted(call(filesystem, "find", folder, detail=True).items()):
                if any(part.startswith(("_", ".")) for part in name.removeprefix(folder).split("/")):
                    continue
                size = about["size"]
                if size < 2 * len(_MAGIC):
                    return False
                return bool(call(filesystem, "cat_file", name, start=size - len(_MAGIC), end=size) == _MAGIC)
        return False

    def get_parquet_dataset(self, path: str) -> Any:
        filesystem, folder = self.fs, self.get_localized_path(path)
        parquet = import_parquet()
        with asked(path):
            filesystem.invalidate_cache()
            return parquet.ParquetDataset(folder, filesystem=filesystem)

    def get_train_data_path(self, idx: int | None = None) -> str:
        return _numbered(self._train_path, idx)

    def get_val_data_path(self, idx: int | None = None) -> str:
        return _numbered(self._val_path, idx)

    def get_test_data_path(self, idx: int | None = None) -> str:
        return _numbered(self._test_path, idx)

    def saving_runs(self) -> bool:
        return self._save_runs

    def get_runs_path(self) -> str:
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        return _join(self._runs_path, run_id)

    def get_checkpoint_path(self, run_id: str) -> str | None:
        return _join(self.get_run_path(run_id), self._checkpoint_filename) if self._save_runs else None

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        if not self.exists(self.get_run_path(run_id)):
            return []
        filesystem, folder = self.fs, self.get_localized_path(self.get_run_path(run_id))
        with asked(self.get_run_path(run_id)):
            names = [str(name).removeprefix(folder).strip("/") for name in call(filesystem, "find", folder)]
        return [_join(self.get_run_path(run_id), name) for name in sorted(names) if name.endswith(suffix)]

    def get_logs_path(self, run_id: str) -> str | None:
        return _join(self.get_run_path(run_id), _LOGS) if self._save_runs else None

    def get_checkpoint_filename(self) -> str:
        return self._checkpoint_filename

    def get_logs_subdir(self) -> str:
        return _LOGS

    def exists(self, path: str) -> bool:
        filesystem, local = self.fs, self.get_localized_path(path)
        with asked(path):
            filesystem.invalidate_cache()
            for name in names_of(filesystem, local):
                # Not fs.exists(): that calls a file missing when the file system can't be asked.
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    call(filesystem, "info", name)
                    return True
        self._check_bucket(path)
        return False

    def read(self, path: str) -> bytes:
        filesystem, local = self.fs, self.get_localized_path(path)
        with asked(path):
            for name in names_of(filesystem, local):
                with contextlib.suppress(FileNotFoundError):
                    return read_file(filesystem, name)
        self._check_bucket(path)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def write(self, path: str, content: bytes) -> None:
        self._write(path, content)

    def _write(self, path: str, content: bytes | str) -> None:
        """Writes bytes, or the local file of this name."""
        filesystem, local = self.fs, self.get_localized_path(path)
        try:
            with asked(path):
                write_file(filesystem, local, content)
        except FileNotFoundError:
            self._check_bucket(path)
            raise

    def check_writable(self, writes_data: bool) -> None:
        """Writes a file where a training is going to write, and removes it. Folders are made.

        On object stores only the folder of runs is checked: Spark may write data there with other credentials.

        writes_data: whether data sets are written in addition to runs.

        Raises:
            OSError: the file can't be written. It names the folder and the reason.
        """
        folders = [self._runs_path] if self._save_runs else []
        if writes_data and not bucket_of(self.fs, self.get_localized_path(self._train_path)):
            folders += [path.rpartition("/")[0] for path in (self._train_path, self._val_path)]
        for folder in dict.fromkeys(folders):
            local = self.get_localized_path(_join(folder, f".horovod-{uuid.uuid4().hex[:8]}"))
            try:
                with asked(folder):
                    write_file(self.fs, local, b"")
            except FileNotFoundError:
                self._check_bucket(folder)
                raise
            with contextlib.suppress(Exception):  # who may write need not be allowed to remove
                call(self.fs, "rm_file", local)

    def _check_bucket(self, path: str) -> None:
        """Raises OSError where a path is not there because its bucket is not: its name is wrong, and a run would begin
        anew.
        """
        bucket = bucket_of(self.fs, self.get_localized_path(path))
        if not bucket or bucket in self._buckets:
            return
        try:
            call(self.fs, "info", bucket)
        except FileNotFoundError as error:
            raise failed(path, f"there is no bucket {bucket!r}") from error
        except Exception:
            return  # the service answers, and lets some who may use names in the bucket not see the bucket itself
        self._buckets.add(bucket)

    def get_local_output_dir_fn(self, run_id: str) -> LocalOutputDir:
        return local_output_dir

    def sync_fn(self, run_id: str) -> Sync:
        return FolderSync(partial(_upload, self), self.get_run_path(run_id))


class FilesystemStore(AbstractFilesystemStore):
    """A store on the file system that the URL names: file (also for a plain path), s3, gs, abfs, memory, and so on.

        >>> store = FilesystemStore("s3://bucket/experiments", storage_options={"profile": "training"})

    Local paths must mean the same folder on all hosts. Packages: s3fs for s3, gcsfs for gs, adlfs for abfs.
    """

    def get_full_path(self, path: str) -> str:
        path = os.fspath(path)
        if "://" in path:
            return path.rstrip("/")
        if path.startswith("dbfs:/"):
            said = f"{path} is on Databricks, and this host is not: DATABRICKS_RUNTIME_VERSION is not set."
            raise ValueError(coded(DataCode.WRONG_STORE_PATH, said))
        if ":/" in path and not path.startswith(("/", "file:/")):
            said = f"{path!r} is no path, and no URL either: write {path.replace(':/', '://', 1)!r}."
            raise ValueError(coded(DataCode.WRONG_STORE_PATH, said))
        return "file://" + os.path.abspath(os.path.expanduser(path.removeprefix("file:")))

    def _make_fs(self) -> Any:
        try:
            import fsspec

            fsspec.get_filesystem_class(fsspec.core.split_protocol(self.prefix_path)[0])
        except ImportError as error:
            raise ImportError(coded(DataCode.MISSING_DATA_PACKAGE, f"{self.prefix_path}: {error}")) from error
        except ValueError as error:
            raise ValueError(coded(DataCode.WRONG_STORE_PATH, f"{self.prefix_path}: {error}")) from error
        try:
            return fsspec.core.url_to_fs(self.prefix_path, **self.storage_options)[0]
        except Exception as error:  # a file with credentials that is not there is no path of the store
            raise failed(self.prefix_path, f"{type(error).__name__}: {error}") from error


class LocalStore(FilesystemStore):
    """The older name of FilesystemStore, for a folder that all hosts share."""


def _upload(store: AbstractFilesystemStore, path: str, local_file: str) -> None:
    store._write(path, local_file)


def _numbered(path: str, idx: int | None) -> str:
    return path if idx is None else f"{path}.{idx}"


def _join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


class DBFSLocalStore(FilesystemStore):
    """A store below /dbfs, named `/dbfs/path`, `dbfs:/path`, `file:/dbfs/path` or `file:///dbfs/path`.

    prefix_path: one of these. The other arguments are those of FilesystemStore. Raises ValueError for another path.
    """

    # The beginnings of paths of DBFS, and the local folder that each means; longer ones first.
    _DBFS_PREFIX_MAPPING: ClassVar[dict[str, str]] = {
        "file:///dbfs/": "/dbfs/",
        "file:/dbfs/": "/dbfs/",
        "dbfs:/": "/dbfs/",
        "/dbfs/": "/dbfs/",
    }

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        if not self.matches_dbfs(prefix_path):
            said = f"{prefix_path!r} is no path of DBFS. Write /dbfs/path or dbfs:/path."
            raise ValueError(coded(DataCode.WRONG_STORE_PATH, said))
        super().__init__(prefix_path, *args, **kwargs)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Whether the path is one of DBFS and this is a node of Databricks."""
        return "DATABRICKS_RUNTIME_VERSION" in os.environ and cls.matches_dbfs(path)

    @classmethod
    def matches_dbfs(cls, path: str) -> bool:
        """Whether the path is one of DBFS."""
        return not path.startswith("dbfs://") and path.startswith(tuple(cls._DBFS_PREFIX_MAPPING))

    @classmethod
    def normalize_path(cls, path: str) -> str:
        """The path in the local folder.

        >>> DBFSLocalStore.normalize_path("dbfs:/runs")
        '/dbfs/runs'
        """
        for prefix, folder in cls._DBFS_PREFIX_MAPPING.items():
            if path.startswith(prefix):
                return folder + path.removeprefix(prefix)
        return path

    def get_full_path(self, path: str) -> str:
        return super().get_full_path(self.normalize_path(path))

    def get_checkpoint_filename(self) -> str:
        return f"{super().get_checkpoint_filename().removesuffix('.tf')}.tf"

    def get_checkpoint_path(self, run_id: str) -> str | None:
        return f"{self.get_run_path(run_id)}/{self.get_checkpoint_filename()}" if self.saving_runs() else None
