"""HDFSStore: a store on Hadoop's file system."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, BinaryIO

from horovod.base.errors import DataCode, TrainingCode, coded
from horovod.spark.common.store.base import Sync
from horovod.spark.common.store.files import FolderSync, asked, write_file
from horovod.spark.common.store.filesystem import AbstractFilesystemStore

_SCHEME = "hdfs://"
_URL = re.compile(r"hdfs://(?P<host>[^/:]*)(?::(?P<port>[0-9]+))?(?P<path>/.*)")


class HDFSStore(AbstractFilesystemStore):
    """A store on HDFS, by libhdfs through fsspec and pyarrow: they need Java, HADOOP_HOME and CLASSPATH on all hosts.

    `hdfs://namenode:8020/path` and `hdfs://nameservice/path` say which cluster; `hdfs:///path` and `/path` mean the one
    of Hadoop's own configuration (fs.defaultFS). All paths of a store are on one cluster.

    Args:
        prefix_path: see above; the others follow FilesystemStore.
        host, port: if `prefix_path` does not say it.
        user, kerb_ticket: the user: a name, the path of a ticket cache of Kerberos.
        driver: "libhdfs", the only one that there still is.
        extra_conf: settings of Hadoop.

    Raises:
        ValueError: a URL that is no hdfs:// URL, or names another cluster than `host` and `port` or the prefix do.
    """

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: Mapping[str, str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if driver != "libhdfs":
            said = f"driver must be 'libhdfs', not {driver!r}: pyarrow has no other one any more."
            raise ValueError(coded(TrainingCode.INVALID_ARGUMENT, said))
        of_url = _parse(prefix_path)
        given = (host or "", port)
        for name, ours, theirs in zip(("host", "port"), given, of_url, strict=False):
            if ours and theirs and ours != theirs:
                said = f"{prefix_path} names the {name} {theirs}, and {name}={ours!r} another one."
                raise ValueError(coded(DataCode.WRONG_STORE_PATH, said))
        self._host, self._port = of_url[0] or given[0], of_url[1] or given[1]
        self._hdfs_kwargs: dict[str, Any] = {
            "host": self._host or "default",
            "port": self._port or 0,
            "user": user,
            "kerb_ticket": kerb_ticket,
            "extra_conf": dict(extra_conf) if extra_conf else None,
        }
        super().__init__(prefix_path, *args, **kwargs)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Whether the path is one of HDFS."""
        return path.startswith(_SCHEME)

    @property
    def path_prefix(self) -> str:
        """The beginning of this store's URLs: scheme and cluster."""
        return f"{_SCHEME}{self._host}" + (f":{self._port}" if self._port else "")

    def get_full_path(self, path: str) -> str:
        return self.path_prefix + self.get_localized_path(path)

    def get_localized_path(self, path: str) -> str:
        host, port, local = _parse(path)
        if (host and host != self._host) or (port and port != self._port):
            said = f"{path} is on another cluster than this store, which is on {self.path_prefix}/."
            raise ValueError(coded(DataCode.WRONG_STORE_PATH, said))
        return local

    def get_storage_options(self) -> dict[str, Any]:
        return {**self._hdfs_kwargs, **self.storage_options}

    def _make_fs(self) -> Any:
        return _hadoop(self.get_storage_options())

    def _get_filesystem_fn(self) -> Callable[[], HadoopFiles]:
        """A function for the processes of a training, which makes their connection."""
        return partial(HadoopFiles, self.get_storage_options())

    def sync_fn(self, run_id: str) -> Sync:
        return FolderSync(_Uploads(self._get_filesystem_fn()), self.get_localized_path(self.get_run_path(run_id)))


class HadoopFiles:
    """The file system as the processes of a training use it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._fs = _hadoop(options)

    def upload(self, path: str, file: BinaryIO) -> None:
        """Writes the content of an open local file to `path`."""
        with asked(path):
            write_file(self._fs, path, file.name)


class _Uploads:
    """Uploads files over one connection, made at the first one."""

    def __init__(self, connect: Callable[[], HadoopFiles]) -> None:
        self._connect = connect
        self._files: HadoopFiles | None = None

    def __call__(self, path: str, local_file: str) -> None:
        self._files = self._files or self._connect()
        with open(local_file, "rb") as file:
            self._files.upload(path, file)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None}


def _hadoop(options: Mapping[str, Any]) -> Any:
    try:
        import fsspec

        return fsspec.filesystem("hdfs", **options)
    except (ImportError, OSError) as error:  # no fsspec or pyarrow; no libhdfs, no Java, no Hadoop
        sentence = f"HDFS can't be used on this host: {error}"
        raise OSError(coded(DataCode.MISSING_DATA_PACKAGE, sentence)) from error


def _parse(path: str) -> tuple[str, int | None, str]:
    """Host, port and path of a URL or of an absolute path."""
    if path.startswith("/"):
        return "", None, path.rstrip("/") or "/"
    if found := _URL.fullmatch(path):
        return found["host"], int(found["port"]) if found["port"] else None, found["path"].rstrip("/") or "/"
    said = f"{path!r} is no path of HDFS. Write hdfs://host:port/path, hdfs:///path or /path."
    raise ValueError(coded(DataCode.WRONG_STORE_PATH, said))
