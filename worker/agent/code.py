"""The code of a job on its host: fetched by its hash, verified, kept for the next job, unpacked for each worker.

A user who may submit jobs may run any command on this host. Their archive is unpacked with care all the same: it writes
below its folder only, its links stay inside that folder, it holds no devices, and its size is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import os
import posixpath
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from horovod.base.errors import ClusterCode, coded

MAX_ENTRIES = 100_000
MAX_UNPACKED_BYTES = 1 << 30
CACHE_BYTES = 1 << 30
_NAME = re.compile(r"[0-9a-f]{64}")
_COPY_BYTES = 1 << 20
_HEAD_BYTES = 2048  # what the head of one entry takes in the archive, with padding

Fetch = Callable[[str, int], Awaitable[bytes]]


class CodeCache:
    """Archives in the agent's state, named by their content."""

    def __init__(self, state: Path, fetch: Fetch, most_bytes: int = CACHE_BYTES) -> None:
        """fetch: returns the chunk with this index of an archive, or raises OSError with a sentence."""
        self._folder = state / "code"
        self._fetch = fetch
        self._most_bytes = most_bytes
        self._locks: dict[str, asyncio.Lock] = {}

    async def unpack(self, name: str, size: int, folders: Sequence[Path], wanted: Callable[[], bool]) -> None:
        """Unpacks the archive into each folder. ValueError or OSError with a sentence.

        wanted: whether the job that the code is for is still to be started.
        """
        if not _NAME.fullmatch(name):
            raise _damaged("the name of its code is no SHA-256")
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            path = await self._archive(name, size, wanted)
            for folder in folders:
                await asyncio.to_thread(unpack, path, folder)
        self._locks.pop(name, None)

    async def _archive(self, name: str, size: int, wanted: Callable[[], bool]) -> Path:
        path = self._folder / name
        if await asyncio.to_thread(_is_whole, path, name):
            return path
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix="new-", dir=self._folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                got, index = 0, 0
                while got < size:
                    if not wanted():
                        raise ValueError("it was ended while its code was fetched")
                    data = await self._fetch(name, index)
                    if not data or got + len(data) > size:
                        raise _damaged("its code is longer or shorter than it was said to be")
                    await asyncio.to_thread(file.write, data)
                    got, index = got + len(data), index + 1
            if not await asyncio.to_thread(_is_whole, Path(temporary), name):
                raise _damaged("its code is not what its name says: something on the way has changed it")
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        self._make_room(path)
        return path

    def _make_room(self, newest: Path) -> None:
        found = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in found)
        for path in found:
            if total <= self._most_bytes:
                break
            if path != newest and _NAME.fullmatch(path.name) and path.name not in self._locks:
                total -= path.stat().st_size
                path.unlink()

    def clear(self) -> None:
        """Removes what an earlier agent did not finish."""
        for path in self._folder.glob("new-*"):
            path.unlink(missing_ok=True)


def _is_whole(path: Path, name: str) -> bool:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while data := file.read(_COPY_BYTES):
                digest.update(data)
        os.utime(path)  # the archive that was used last is deleted last
    except FileNotFoundError:
        return False
    return digest.hexdigest() == name


def unpack(archive: Path, folder: Path, *, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_UNPACKED_BYTES) -> None:
    """Writes what is in `archive` below `folder`, which is empty. ValueError with a sentence; then nothing is left.

    Links come last, so that nothing is written through one, and each is looked at again when all are there.
    """
    try:
        with (
            gzip.open(archive, "rb") as content,
            tarfile.open(fileobj=_Bounded(content, max_bytes + max_entries * _HEAD_BYTES), mode="r|") as tar,  # type: ignore[call-overload]
        ):
            _write(tar, folder, max_entries, max_bytes)
    except (tarfile.TarError, EOFError, ValueError, zlib.error) as error:
        _empty(folder)
        raise _damaged(f"its code can't be unpacked: {error}") from None
    except OSError as error:
        _empty(folder)
        if error.errno is None:  # an error of zlib or gzip, not of the system
            raise _damaged(f"its code can't be unpacked: {error}") from None
        raise


def _damaged(why: str) -> ValueError:
    return ValueError(coded(ClusterCode.CODE_DAMAGED, why))


class _Bounded:
    """A file of a bounded size for tarfile to read: the heads of an archive may be unpacked to any size, too."""

    def __init__(self, content: gzip.GzipFile, most_bytes: int) -> None:
        self._content = content
        self._left = most_bytes

    def read(self, count: int) -> bytes:
        data = self._content.read(count)
        self._left -= len(data)
        if self._left < 0:
            raise ValueError("it is longer than its entries can be")
        return data


def _write(tar: tarfile.TarFile, folder: Path, max_entries: int, max_bytes: int) -> None:
    links: list[tuple[str, str]] = []
    total = 0
    for count, member in enumerate(tar, 1):
        name = member.name
        total += member.size
        if count > max_entries or total > max_bytes:
            raise ValueError(f"it has more than {max_entries:,} entries or {max_bytes >> 20} MiB")
        if _is_outside(name):
            raise ValueError(f"it has an entry {name!r}, which is not below its folder")
        path = folder / name
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if member.isdir():
            path.mkdir(mode=0o755, exist_ok=True)
        elif member.isreg():
            source = tar.extractfile(member)
            assert source is not None
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(path, flags, 0o755 if member.mode & 0o100 else 0o644), "wb") as file:
                shutil.copyfileobj(source, file, _COPY_BYTES)
        elif member.issym():
            if leads_out(name, member.linkname):
                raise ValueError(f"its entry {name!r} is a link to {member.linkname!r}, outside of its folder")
            links.append((name, member.linkname))
        else:
            raise ValueError(f"its entry {name!r} is neither a file nor a folder nor a link")
    for name, target in links:
        os.symlink(target, folder / name)
    top = os.path.realpath(folder)
    for name, target in links:
        if os.path.commonpath([top, os.path.realpath(folder / name)]) != top:
            raise ValueError(f"its entry {name!r} is a link to {target!r}, outside of its folder")


def _is_outside(name: str) -> bool:
    return name.startswith("/") or "\0" in name or any(part in ("", ".", "..") for part in name.rstrip("/").split("/"))


def leads_out(name: str, target: str) -> bool:
    """Whether a link with this name and target points outside of the folder that `name` is below."""
    end = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    return target.startswith("/") or end == ".." or end.startswith("../")


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
