"""Files of a store, written and read as a whole or not at all, whenever the writer dies; and errors for what can't be.

Object stores show an object once its upload is complete. Elsewhere a file is written under another name beside its
place, and renamed. On a local disk its content is on the disk before it has its name. HDFS, for one, renames onto no
file. There the earlier file gets a second name until the new one has its own, and readers look for both: names_of().

A question to a file system has an answer, or ends with an OSError that has a code. Packages of fsspec raise the
exceptions of the libraries below them: many are no OSError, some have no text, and some can't be pickled on their way
from a rank to the driver. Some packages wait forever: an upload of s3fs waits for the service to say that it may begin,
and no timeout of botocore counts until it has.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from horovod.base.errors import DataCode, coded
from horovod.data.services import answer_limit_seconds, reason_in_words


def call(filesystem: Any, method: str, *arguments: Any, content_bytes: int = 0, **options: Any) -> Any:
    """filesystem.method(*arguments, **options). Where it waits for a service, TimeoutError after the time that a
    content of `content_bytes` may take (answer_limit_seconds); the method is cancelled then.
    """
    if not getattr(filesystem, "async_impl", False):
        return getattr(filesystem, method)(*arguments, **options)
    from fsspec.asyn import FSTimeoutError, sync

    coroutine = getattr(filesystem, f"_{method}")
    seconds = answer_limit_seconds(content_bytes)
    try:
        return sync(filesystem.loop, coroutine, *arguments, timeout=seconds, **options)
    except FSTimeoutError as error:  # of ours, or of the package
        raise TimeoutError("there was no answer in time") from error


@contextlib.contextmanager
def asked(path: str) -> Iterator[None]:
    """Makes of an exception in the block an OSError that names the path, the reason and a code. FileNotFoundError and
    PermissionError keep their types.
    """
    try:
        yield
    except Exception as error:
        raise failed(path, error) from error


def failed(path: str, why: Exception | str) -> OSError:
    """The error for a path of a store that can't be used."""
    kind = next((one for one in (FileNotFoundError, PermissionError) if isinstance(why, one)), OSError)
    reason = reason_in_words(why)
    if isinstance(why, Exception):
        reason = f"{type(why).__name__}: {reason}" if reason else type(why).__name__
    return kind(coded(DataCode.DATA_STORE_FAILED, f"{path} can't be used: {reason}."))


# fsspec's names of the object stores whose package is known to upload an object as a whole, from bytes and from files.
# With others the object is copied onto its name, which is safe, but takes longer.
_OBJECT_STORES = frozenset(("abfs", "abfss", "az", "gcs", "gs", "s3", "s3a"))
_S3 = frozenset(("s3", "s3a"))
_LOCAL = frozenset(("file", "local"))


def write_file(filesystem: Any, path: str, content: bytes | str) -> None:
    """Writes bytes, or the local file of this name, to `path` of an fsspec file system; makes the folders above it."""
    protocols = _protocols(filesystem)
    if protocols & _LOCAL:
        _write_local(path, content)
    elif protocols & _OBJECT_STORES:
        _put(filesystem, path, content)  # no folders: making them would look for the bucket, and try to make that
    else:
        if "/" in path.strip("/"):
            filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        with _other_name(path, filesystem.rm_file) as other:
            _put(filesystem, other, content)
            _rename(filesystem, other, path)


def read_file(filesystem: Any, path: str) -> bytes:
    """The content of a file, all of it of one version. FileNotFoundError where there is none."""
    filesystem.invalidate_cache()  # of folders: others write, too
    size = call(filesystem, "info", path)["size"]
    options: dict[str, Any] = {}
    if _protocols(filesystem) & _S3 and "max_concurrency" in inspect.signature(filesystem._cat_file).parameters:
        # Otherwise s3fs reads a large object in parts, which are of two versions when it is replaced meanwhile.
        options["max_concurrency"] = 1
    return bytes(call(filesystem, "cat_file", path, content_bytes=size or 0, **options))


def names_of(filesystem: Any, path: str) -> tuple[str, ...]:
    """Where to look for the file that was written to `path`, one after the other until it is found."""
    if _protocols(filesystem) & (_LOCAL | _OBJECT_STORES):
        return (path,)
    return path, _earlier(path), path  # again, since a writer may have ended between the first two


def bucket_of(filesystem: Any, path: str) -> str:
    """The bucket or container that `path` is in, which somebody has to make before; "" where folders are made."""
    return path.strip("/").partition("/")[0] if _protocols(filesystem) & _OBJECT_STORES else ""


def _protocols(filesystem: Any) -> set[str]:
    return {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)


def _put(filesystem: Any, path: str, content: bytes | str) -> None:
    # Both tell the store that the upload is complete only when it is. A file from open() says so when it is closed,
    # also when an exception closes it.
    if isinstance(content, bytes):
        call(filesystem, "pipe_file", path, content, content_bytes=len(content))
    else:
        call(filesystem, "put_file", content, path, content_bytes=os.path.getsize(content))


def _rename(filesystem: Any, source: str, target: str) -> None:
    if _is_renamed(filesystem, source, target):
        return
    earlier = _earlier(target)
    if filesystem.exists(earlier):  # of a writer that died before it could remove it: `target` is newer
        filesystem.rm_file(earlier)
    filesystem.mv(target, earlier)
    try:
        filesystem.mv(source, target)
    except BaseException:
        with contextlib.suppress(OSError):
            filesystem.mv(earlier, target)
        raise
    filesystem.rm_file(earlier)


def _is_renamed(filesystem: Any, source: str, target: str) -> bool:
    """Whether the file has the name of another now. False where the file system renames onto no file."""
    try:
        filesystem.mv(source, target)
    except OSError:
        if not filesystem.exists(target):
            raise
        return False
    return not filesystem.exists(source)  # WebHDFS answers with a boolean, which fsspec does not look at


def _earlier(path: str) -> str:
    """The name of the file that is being replaced; readers of folders leave it out."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/.{name}.earlier"


@contextlib.contextmanager
def _other_name(path: str, remove: Callable[[str], object]) -> Iterator[str]:
    """A name beside `path`, which readers of folders leave out; its file is removed when the block fails."""
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
        """Passes an exception of the upload on; the next call tries again."""
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
            try:
                self._upload(f"{self._target}/{place}", file)
            except FileNotFoundError:
                if os.path.exists(file):
                    raise
                continue  # removed meanwhile, as above
            self._seen[file] = state
