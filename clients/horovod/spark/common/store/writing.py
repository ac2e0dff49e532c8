"""Files that are there as a whole or not at all, whenever the writer dies.

Object stores show an object once its upload is complete. Elsewhere a file is written under another name beside its
place, and renamed. On a local disk its content is on the disk before it has its name.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

# fsspec's names of file systems whose uploads of one object are atomic, so that a second name would only cost a copy.
_OBJECT_STORES = frozenset(
    ("abfs", "abfss", "az", "gcs", "gs", "memory", "oci", "oss", "r2", "s3", "s3a", "wasb", "wasbs")
)
_LOCAL = frozenset(("file", "local"))


def write_file(filesystem: Any, path: str, content: bytes | str) -> None:
    """Writes bytes, or the local file of this name, to `path` of an fsspec file system; makes the folders above it."""
    protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
    if protocols & _LOCAL:
        _write_local(path, content)
        return
    if "/" in path.strip("/"):
        filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
    if protocols & _OBJECT_STORES:
        _put(filesystem, path, content)
        return
    with _other_name(path, filesystem.rm_file) as other:
        _put(filesystem, other, content)
        _rename(filesystem, other, path)


def _put(filesystem: Any, path: str, content: bytes | str) -> None:
    # Both tell the store that the upload is complete only when it is. A file from open() says so when it is closed,
    # also when an exception closes it.
    if isinstance(content, bytes):
        filesystem.pipe_file(path, content)
    else:
        filesystem.put_file(content, path)


def _rename(filesystem: Any, source: str, target: str) -> None:
    try:
        filesystem.mv(source, target)
    except OSError:
        if not filesystem.exists(target):
            raise
        filesystem.rm_file(target)  # HDFS, for one, renames onto no file
        filesystem.mv(source, target)


@contextlib.contextmanager
def _other_name(path: str, remove: Callable[[str], object]) -> Iterator[str]:
    """A name beside `path`, that readers of folders leave out; what has it is removed when the block fails."""
    folder, _, name = path.rpartition("/")
    other = f"{folder}/.{name}.{uuid.uuid4().hex[:8]}.part"
    try:
        yield other
    except BaseException:
        with contextlib.suppress(OSError):
            remove(other)
        raise


def _write_local(path: str, content: bytes | str) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with _other_name(os.path.abspath(path), os.remove) as other:
        with open(other, "wb") as file:
            _copy(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(other, path)


def _copy(content: bytes | str, file: BinaryIO) -> None:
    if isinstance(content, bytes):
        file.write(content)
        return
    with open(content, "rb") as source:
        while block := source.read(1 << 20):
            file.write(block)


@contextlib.contextmanager
def local_output_dir() -> Iterator[str]:
    """A new folder on this host, removed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="horovod-run-", ignore_cleanup_errors=True) as folder:
        yield folder


class FolderSync:
    """sync(folder): gives `upload(path, local_file)` each file of a local folder that is new or has changed since the
    last call; `path` is its place below `target`.

    Files are uploaded in the order of their last changes, so that what was written first is there first.
    """

    def __init__(self, upload: Callable[[str, str], None], target: str) -> None:
        self._upload = upload
        self._target = target.rstrip("/")
        self._seen: dict[str, tuple[int, int]] = {}

    def __call__(self, folder: str) -> None:
        """Raises what the upload does; the next call tries again."""
        changed = []
        for parent, _, names in os.walk(folder):
            for name in names:
                file = os.path.join(parent, name)
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile, as temporary files are
                    status = os.stat(file)
                    state = (status.st_mtime_ns, status.st_size)
                    if self._seen.get(file) != state:
                        changed.append((state, file))
        for state, file in sorted(changed):
            place = os.path.relpath(file, folder).replace(os.sep, "/")
            self._upload(f"{self._target}/{place}", file)
            self._seen[file] = state
