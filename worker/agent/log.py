"""What one rank has printed, kept on its host: a log of records in segments, of which the oldest are deleted.

A position counts the bytes of all records so far, so it rises for ever. A segment is a file named after the position at
which it begins; a record is a head (stream, length, time) and the bytes as they came, and never spans two segments. One
process appends, any number read, up to the position that the writer has told them.

A log takes `limit_bytes` at most. At that limit the oldest segment is deleted, unless a reader holds the log: `append`
then says that there is no room until that reader has taken more, and the rank waits in its own write. So no output is
lost that a reader wants, and no log grows beyond its limit.

A log goes on when the disk is full: it has one segment more than it needs, allocated in advance. Where the disk has no
room for a further segment, the oldest one is written over as soon as it may be deleted.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

LIMIT_BYTES = 64 << 20  # bytes of the log of each rank
SEGMENT_BYTES = 1 << 20
RECORD_BYTES = 64 << 10  # bytes of one record at most
STREAMS = ("stdout", "stderr", "result")  # by number, as OutputStream in jobs.proto

_HEAD = struct.Struct("<BId")
_SPARE = "spare"


class Record(NamedTuple):
    stream: int
    data: bytes
    position: int  # the position in the log behind this record
    written_at: float


class RankLog:
    """Writes one rank's log. OSError when the disk has no room for two segments."""

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int = LIMIT_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        held: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.end = 0
        self._folder = folder
        self._limit = max(limit_bytes, 2 * segment_bytes)
        self._segment = segment_bytes
        self._held_from: int | None = 0 if held else None
        self._clock = clock
        self._starts: deque[int] = deque([0])
        self._waiting: deque[bytes] = deque()  # records for which the log has no room: at most one read of a pipe
        self._allocate(self._path(0))
        self._allocate(folder / _SPARE)
        self._file = os.open(self._path(0), os.O_WRONLY | os.O_CLOEXEC)

    def append(self, stream: int, data: bytes) -> bool:
        """Takes `data` in any case; False when a reader must take something before there is room for more."""
        now = self._clock()
        for start in range(0, len(data), RECORD_BYTES):
            part = data[start : start + RECORD_BYTES]
            self._waiting.append(_HEAD.pack(stream, len(part), now) + part)
        return self._write_waiting()

    def hold(self, position: int | None) -> bool:
        """Notes that the reader has taken everything up to `position`; None: no reader holds the log any more.

        Returns whether the log has room.
        """
        if position is None or self._held_from is None or position > self._held_from:
            self._held_from = position
        return self._write_waiting()

    @property
    def waits(self) -> bool:
        """Whether records wait in memory until a reader has made room for them in the log."""
        return bool(self._waiting)

    def close(self) -> None:
        """Drops the records that wait for room, and gives back disk space that is not needed."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self.end - self._starts[-1])
        os.close(self._file)
        with contextlib.suppress(OSError):
            os.unlink(self._folder / _SPARE)

    def _write_waiting(self) -> bool:
        while self._waiting:
            record = self._waiting[0]
            if self.end + len(record) - self._starts[-1] > self._segment and not self._next_segment():
                return False
            if not self._make_room(len(record)):
                return False
            view = memoryview(record)
            at = self.end - self._starts[-1]
            while view:
                written = os.pwrite(self._file, view, at)
                view, at = view[written:], at + written
            self.end += len(record)
            self._waiting.popleft()
        return True

    def _make_room(self, count: int) -> bool:
        while self.end + count - self._starts[0] > self._limit:
            if not self._may_drop_oldest():
                return False
            os.unlink(self._path(self._starts.popleft()))
        return True

    def _may_drop_oldest(self) -> bool:
        return len(self._starts) > 1 and (self._held_from is None or self._starts[1] <= self._held_from)

    def _next_segment(self) -> bool:
        spare = self._folder / _SPARE
        if not spare.exists():
            try:
                self._allocate(spare)
            except OSError:
                if not self._may_drop_oldest():
                    return False
                os.rename(self._path(self._starts.popleft()), spare)
        os.rename(spare, self._path(self.end))
        os.close(self._file)
        self._file = os.open(self._path(self.end), os.O_WRONLY | os.O_CLOEXEC)
        self._starts.append(self.end)
        with contextlib.suppress(OSError):  # the oldest segment is used instead
            self._allocate(spare)
        return True

    def _allocate(self, path: Path) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, self._segment)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(file)

    def _path(self, start: int) -> Path:
        return self._folder / f"{start:020d}"


class LogReader:
    """Reads the log in `folder`, whose writer may be another process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, position: int, end: int, most_bytes: int) -> tuple[list[Record], int]:
        """Records from `position`, not beyond `end`, at least one if there is any; and how many bytes are gone.

        A call returns records of one segment. Where all up to `end` were deleted: [] and the number of their bytes.
        """
        for _ in range(8):  # a segment may be deleted after it was found and before it is read
            starts = sorted(int(name) for name in os.listdir(self._folder) if name.isdigit())
            begin = max((start for start in starts if start <= position), default=None)
            if begin is None:
                begin = starts[0] if starts else end
            at = max(position, begin)
            if at >= end:
                return [], max(0, at - position)
            stop = min([end, *(start for start in starts if start > begin)])
            if at >= stop:  # the segment that began here was deleted
                return [], 0
            with contextlib.suppress(FileNotFoundError):
                return self._records(begin, at, stop, most_bytes), at - position
        return [], 0

    def _records(self, begin: int, at: int, stop: int, most_bytes: int) -> list[Record]:
        count = min(stop - at, max(most_bytes, RECORD_BYTES + _HEAD.size))
        file = os.open(self._folder / f"{begin:020d}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.pread(file, count, at - begin)
        finally:
            os.close(file)
        found: list[Record] = []
        start = taken = 0
        while start + _HEAD.size <= len(content):
            stream, length, when = _HEAD.unpack_from(content, start)
            data_at = start + _HEAD.size
            if data_at + length > len(content) or (found and taken + length > most_bytes):
                break
            start = data_at + length
            taken += length
            found.append(Record(stream, content[data_at:start], at + start, when))
        return found
