"""Packs the folder that a job file names: the same files always make the same archive, whose hash is its name.

What .horovodignore names is left out, by the rules of gitignore(5); tests compare it with `git check-ignore`. There is
one such file, at the top of the code. Its reader is small enough to be our own: the launcher is installed on every host
(docs/adr/0054-job-files.md).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import stat
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from horovod.base.errors import ClusterCode, coded
from horovod.coordinator.core.cluster.code import MAX_CODE_BYTES
from horovod.worker.agent.code import MAX_ENTRIES, MAX_UNPACKED_BYTES, leads_out

IGNORE_FILE = ".horovodignore"
ALWAYS = (".git/", "__pycache__/")  # ignored unless the file says otherwise
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


_ADVICE = (
    f"Exclude files that are not code in {IGNORE_FILE}: data and checkpoints belong on a file system that the "
    "hosts share."
)


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


@dataclass(frozen=True)
class _Rule:
    pattern: re.Pattern[str]
    negated: bool
    folders_only: bool


class Ignored:
    """`has(name, is_folder)`; what is below a folder that it has is not asked for."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._rules = [rule for line in (*ALWAYS, *lines) if (rule := _rule(line)) is not None]

    @classmethod
    def of(cls, folder: Path) -> Ignored:
        """The rules of the file in `folder`, if there is one. OSError when it can't be read."""
        path = folder / IGNORE_FILE
        return cls(path.read_text(encoding="utf-8", errors="surrogateescape").split("\n") if path.exists() else ())

    def has(self, name: str, is_folder: bool) -> bool:
        """Whether the last pattern that fits says so. name: with slashes, from the top."""
        for rule in reversed(self._rules):
            if (is_folder or not rule.folders_only) and rule.pattern.fullmatch(name):
                return not rule.negated
        return False


def _rule(line: str) -> _Rule | None:
    line = line.removesuffix("\r")
    while line.endswith(" ") and not line.endswith("\\ "):
        line = line[:-1]
    if not line or line.startswith("#"):
        return None
    negated = line.startswith("!")
    line = line[1:] if negated else line
    folders_only = line.endswith("/")
    line = line[:-1] if folders_only else line
    if not line:
        return None
    anchored = "/" in line
    translated = _translated(line.removeprefix("/"))
    if translated is None:
        return None
    try:
        pattern = re.compile(translated if anchored else f"(?:.*/)?{translated}", re.DOTALL)
    except re.error:  # a range that runs backwards: git matches nothing with it
        return None
    return _Rule(pattern, negated, folders_only)


_ONE = "[^/]"


def _translated(pattern: str) -> str | None:
    """The pattern as a regular expression; None if it fits nothing."""
    found, at = "", 0
    while at < len(pattern):
        rest = pattern[at:]
        at_start = at == 0 or pattern[at - 1] == "/"
        if at_start and rest.startswith("**/"):
            found, at = f"{found}(?:.*/)?", at + 3
        elif at_start and rest == "**":
            found, at = f"{found}.+" if at else f"{found}{_ONE}*", at + 2
        elif rest[0] == "*":
            found, at = f"{found}{_ONE}*", at + len(rest) - len(rest.lstrip("*"))
        elif rest[0] == "?":
            found, at = found + _ONE, at + 1
        elif rest[0] == "[":
            if (of_set := _set(rest)) is None:
                return None
            found, at = found + of_set[0], at + of_set[1]
        elif rest[0] == "\\":
            if len(rest) == 1:
                return None
            found, at = found + re.escape(rest[1]), at + 2
        else:
            found, at = found + re.escape(rest[0]), at + 1
    return found


_CLASSES = {
    "alnum": "a-zA-Z0-9", "alpha": "a-zA-Z", "blank": " \\t", "digit": "0-9", "lower": "a-z", "upper": "A-Z",
    "space": "\\s", "xdigit": "0-9a-fA-F", "punct": "!-/:-@\\[-`{-~",
}  # fmt: skip


def _set(text: str) -> tuple[str, int] | None:
    """`[a-c]` at the beginning of `text`: its expression and its length; None when it has no end."""
    at = 1
    negated = text[at : at + 1] in ("!", "^")
    at += negated
    inner, first = "", True
    while at < len(text) and (text[at] != "]" or first):
        first = False
        if (named := re.match(r"\[:([a-z]+):\]", text[at:])) and named[1] in _CLASSES:
            inner, at = inner + _CLASSES[named[1]], at + named.end()
        elif text[at] == "\\" and at + 1 < len(text):
            inner, at = inner + re.escape(text[at + 1]), at + 2
        else:
            inner, at = inner + (text[at] if text[at] == "-" else re.escape(text[at])), at + 1
    if at >= len(text):
        return None
    return f"(?!/)[{'^' if negated else ''}{inner}]", at + 1
