"""Packs the folder that a job file names: the same files always make the same archive, whose hash is its name."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from horovod.base.errors import ClusterCode, coded
from horovod.coordinator.core.cluster.code import MAX_CODE_BYTES
from horovod.launch.cluster.job_file.ignore import IGNORE_FILE, Ignored
from horovod.worker.agent.code import MAX_ENTRIES, MAX_UNPACKED_BYTES, leads_out

_TIME = 315532800  # 1980-01-01 for every file: touching a file does not make other code


@dataclass(frozen=True)
class Archive:
    content: bytes = field(repr=False)
    files: int

    @property
    def size(self) -> int:
        return len(self.content)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def pack(folder: Path, where: str) -> Archive:
    """The archive of what is in `folder`, without what .horovodignore names. ValueError with a sentence.

    where: which line of which file asks for it.
    """
    if not folder.is_dir():
        raise ValueError(coded(ClusterCode.CODE_NOT_PACKED, f"{where}: there is no folder {str(folder)!r}."))
    packed = _Limited(where)
    count = total = 0
    path = folder
    with (
        gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0, compresslevel=6) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        try:
            for path, name in _walk(folder, "", Ignored.of(folder)):
                info = _entry(path, name, where)
                count, total = count + 1, total + info.size
                if count > MAX_ENTRIES or total > MAX_UNPACKED_BYTES:
                    raise ValueError(
                        coded(
                            ClusterCode.CODE_TOO_LARGE,
                            f"{where}: the code has more than {MAX_ENTRIES:,} entries or {MAX_UNPACKED_BYTES >> 20} "
                            f"MiB. {_ADVICE}",
                        )
                    )
                if info.isreg():
                    with path.open("rb") as file:  # which is read in pieces, and no further than the archive may grow
                        tar.addfile(info, file)
                else:
                    tar.addfile(info)
        except OSError as error:
            what = f"{str(error.filename or path)!r} can't be packed: {error.strerror or error}"
            sentence = f"{where}: {what.rstrip('.')}."
            raise ValueError(coded(ClusterCode.CODE_NOT_PACKED, sentence)) from error
    return Archive(packed.getvalue(), count)


_ADVICE = f"Name in {IGNORE_FILE} what is no code: data and checkpoints belong on a file system that the hosts share."


def _walk(folder: Path, prefix: str, ignored: Ignored) -> Iterator[tuple[Path, str]]:
    """What is packed, in the order of its names, with the name in the archive."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        name = f"{prefix}{entry.name}"
        is_folder = entry.is_dir(follow_symlinks=False)
        if ignored.has(name, is_folder):
            continue
        yield Path(entry.path), name
        if is_folder:
            yield from _walk(Path(entry.path), f"{name}/", ignored)


def _entry(path: Path, name: str, where: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mtime = _TIME
    status = path.lstat()
    mode = status.st_mode
    info.mode = 0o755 if mode & stat.S_IXUSR else 0o644
    if stat.S_ISDIR(mode):
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    elif stat.S_ISLNK(mode):
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
        if leads_out(name, info.linkname):
            sentence = (
                f"{where}: {name!r} is a link to {info.linkname!r}, outside of the code, which other hosts do not "
                f"have. Put a copy there, or name it in {IGNORE_FILE}."
            )
            raise ValueError(coded(ClusterCode.CODE_NOT_PACKED, sentence))
    elif stat.S_ISREG(mode):
        info.size = status.st_size
    else:
        sentence = f"{where}: {name!r} is neither a file nor a folder nor a link. Name it in {IGNORE_FILE}."
        raise ValueError(coded(ClusterCode.CODE_NOT_PACKED, sentence))
    return info


class _Limited(io.BytesIO):
    """A file in memory that may not grow beyond a limit."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def write(self, data: object, /) -> int:
        count = super().write(data)  # type: ignore[arg-type]
        if self.tell() > MAX_CODE_BYTES:
            self._full()
        return count

    def _full(self) -> None:
        sentence = f"{self._where}: the code has more than {MAX_CODE_BYTES >> 20} MiB when packed. {_ADVICE}"
        raise ValueError(coded(ClusterCode.CODE_TOO_LARGE, sentence))
