"""DBFSLocalStore: a store on Databricks' file system, which every node has as the folder /dbfs."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from horovod.base.errors import DataCode, coded
from horovod.spark.common.store.filesystem import FilesystemStore


class DBFSLocalStore(FilesystemStore):
    """A store below /dbfs, named `/dbfs/path`, `dbfs:/path`, `file:/dbfs/path` or `file:///dbfs/path`.

    The other arguments are those of FilesystemStore. Raises ValueError for another path.
    """

    # What paths of DBFS may begin with, and the local folder that it means; longer ones first.
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
