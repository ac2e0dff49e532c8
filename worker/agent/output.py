"""What training processes print, on its way to the launcher's console and to files.

Three parts, each with a bound on what it holds: `LineSplitter` cuts a byte stream into lines and progress updates,
`Console` puts the lines of all ranks beside each other, and `Writer` is the one thread that writes, so that a stalled
terminal delays the ranks (their pipes fill up) but never the launcher, which must still see signals and exits.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from horovod.base.errors import LaunchCode, coded
from horovod.base.telemetry.logs import line_of
from horovod.base.words import for_people, printable

Stream = Literal["stdout", "stderr"]

LINE_LIMIT_BYTES = 1 << 20  # a longer line is shown in several pieces
QUEUE_LIMIT_BYTES = 1 << 20
LAST_ERROR_BYTES = 400
UPDATE_INTERVAL_S = 10.0  # how often a progress bar leaves a line in a log file
_LAUNCHER: tuple[int, Stream] = (-1, "stderr")  # takes the place of a rank's stream for the launcher's own status line
_END = re.compile(rb"\r?\n|\r")


class Piece(NamedTuple):
    """A line without its end. An update ended with a carriage return: the next one is to be written over it."""

    text: bytes
    update: bool


class LineSplitter:
    """Cuts a stream into pieces, which do not depend on the chunks in which the stream arrives."""

    def __init__(self, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The pieces that `data` completes."""
        seen = max(
            len(self._rest) - 1, 0
        )  # the rest holds no end of line, except perhaps a carriage return as its last byte
        data = self._rest + data
        usable = len(data) - data.endswith(b"\r")  # a last "\r" may be the first half of "\r\n"
        start = 0
        for end in _END.finditer(data, seen, usable):
            yield from self._cut(data[start : end.start()], end.group() == b"\r")
            start = end.end()
        while usable - start > self._limit:
            yield Piece(data[start : start + self._limit], False)
            start += self._limit
        self._rest = data[start:]

    def whole_lines(self, data: bytes) -> bytes | None:
        """The lines that `data` completes, with their ends, at a small part of the cost of `feed`. None where `feed` is
        needed: where a carriage return is in them, or a line may be too long.
        """
        if b"\r" in data or self._rest.endswith(b"\r") or len(self._rest) + len(data) > self._limit:
            return None
        end = data.rfind(b"\n") + 1
        if not end:
            self._rest += data
            return b""
        lines, self._rest = self._rest + data[:end], data[end:]
        return lines

    @property
    def rest(self) -> bytes:
        """The line that has no end yet; empty where its last byte is a "\\r" that may be half of "\\r\\n"."""
        return b"" if self._rest.endswith(b"\r") else self._rest

    def finish(self) -> Iterator[Piece]:
        """The last line, where the stream ended without an end of line."""
        rest, self._rest = self._rest.removesuffix(b"\r"), b""
        if rest:
            yield Piece(rest, False)

    def _cut(self, text: bytes, update: bool) -> Iterator[Piece]:
        while len(text) > self._limit:
            yield Piece(text[: self._limit], False)
            text = text[self._limit :]
        yield Piece(text, update)


class Sink(Protocol):
    """Takes what processes print. `feed` says whether it has room for more; if not, the sink calls `room` later."""

    room: Callable[[], None]

    def feed(self, rank: int, stream: Stream, data: bytes) -> bool:
        """Takes `data` in any case; False asks the caller to pause until `room` is called."""

    def finish(self, rank: int, stream: Stream) -> None:
        """The stream has ended."""


class Writer:
    """A thread that writes to descriptors in order. One other thread may call the methods."""

    def __init__(
        self, limit_bytes: int = QUEUE_LIMIT_BYTES, write: Callable[[int, memoryview], int] = os.write
    ) -> None:
        """write: takes some of the bytes, of which it returns the number, or raises OSError."""
        self._limit = limit_bytes
        self._write_some = write
        self._queue: deque[tuple[int, bytes]] = deque()
        self._held = 0
        self._changed = threading.Condition()
        self._closing = False
        self._asked_for_room = False
        self.room: Callable[[], None] = lambda: None  # called in the writer's thread
        self.failed: Callable[[int, OSError], None] = lambda descriptor, error: (
            None
        )  # called in the writer's thread, once for a descriptor
        self._broken: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="horovod-output", daemon=True)
        self._thread.start()

    def put(self, descriptor: int, data: bytes) -> bool:
        """Queues `data`; False when it is time to wait for `room`."""
        with self._changed:
            self._queue.append((descriptor, data))
            self._held += len(data)
            self._changed.notify_all()
            is_full = self._held > self._limit
            self._asked_for_room |= is_full  # an earlier call may be waiting for room too
            return not is_full

    def close(self, timeout_s: float | None = None) -> bool:
        """Waits until all is written; False when that took too long and the rest is given up."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                batch = self._take()
            for descriptor, data in batch:
                self._write(descriptor, data)
            with self._changed:
                self._held -= sum(len(data) for _, data in batch)
                call = self._asked_for_room and self._held <= self._limit // 2
                self._asked_for_room &= not call
            if call:
                self.room()

    def _take(self) -> list[tuple[int, bytes]]:
        """Empties the queue. Neighbours for one descriptor are joined, so that many lines cost few system calls."""
        joined: list[tuple[int, list[bytes]]] = []
        for descriptor, data in self._queue:
            if joined and joined[-1][0] == descriptor:
                joined[-1][1].append(data)
            else:
                joined.append((descriptor, [data]))
        self._queue.clear()
        return [(descriptor, b"".join(parts)) for descriptor, parts in joined]

    def _write(self, descriptor: int, data: bytes) -> None:
        if descriptor in self._broken:
            return
        view = memoryview(data)
        while view:
            try:
                view = view[self._write_some(descriptor, view) :]
            except BlockingIOError:  # another process of the same terminal has made it non-blocking
                select.select([], [descriptor], [])
            except OSError as error:
                self._broken.add(descriptor)
                self.failed(descriptor, error)
                return


class Console:
    """Lines of all ranks, each behind `[rank]<stream>:`, and files with what each rank wrote, byte for byte.

    The console takes over the writer: it closes the writer when it is closed itself, and when it can't be made.

    A progress bar (text that ends with a carriage return) stays one line at the bottom of a terminal. In a file or a
    pipe only its last state is shown, and one every UPDATE_INTERVAL_S, so that a log neither floods nor falls silent.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        descriptors: tuple[int, int] = (1, 2),
        directory: Path | None = None,
        size: int = 1,
        timestamps: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], time.struct_time] = time.localtime,
        job: str | None = None,
        asking: int | None = None,
    ) -> None:
        """job: its name, where each line is to be a JSON object (base/telemetry/logs.py) that tells rank and stream.

        asking: the rank that reads from the terminal. What it writes without an end of line may be a question, which is
        shown at once.
        """
        self._asking = asking
        self._writer = writer
        self._descriptors: dict[Stream, int] = {"stdout": descriptors[0], "stderr": descriptors[1]}
        self._job = job
        smart = os.environ.get("TERM", "dumb") != "dumb" and job is None
        self._terminal = {stream: smart and os.isatty(fd) for stream, fd in self._descriptors.items()}
        self._timestamps = timestamps
        self._clock = clock
        self._wall_clock = wall_clock
        self._splitters: dict[tuple[int, Stream], LineSplitter] = {}
        self._pending: dict[tuple[int, Stream], bytes] = {}  # stream -> the update of it that its next piece replaces
        self._shown_at: dict[tuple[int, Stream], float] = {}
        self._last_errors: dict[int, bytes] = {}  # rank -> the end of its last line on stderr
        self._status: tuple[int, Stream] | None = None  # the stream whose update is at the bottom of the terminal
        self._files: dict[tuple[int, Stream], int] = {}
        self._is_closing = False
        self.room: Callable[[], None] = lambda: None
        writer.room = self._on_room
        if directory is not None:
            try:
                self._open_files(directory, size)
            except ValueError:
                writer.close()
                raise

    def feed(self, rank: int, stream: Stream, data: bytes) -> bool:
        """Shows the lines that `data` completes; False asks the caller to pause until `room` is called."""
        key = (rank, stream)
        room = True
        if key in self._files:
            room = self._writer.put(self._files[key], data)
        splitter = self._splitters.setdefault(key, LineSplitter())
        is_plain = self._status is None and self._job is None and key not in self._pending
        if stream == "stderr" and (last := (splitter.rest + data).rstrip()):
            self._last_errors[rank] = last[last.rfind(b"\n") + 1 :][-LAST_ERROR_BYTES:]
        lines = splitter.whole_lines(data) if is_plain else None
        if lines is None:
            pieces = splitter.feed(data)
            shown = b"".join(self._update(key, text) if update else self._line(key, text) for text, update in pieces)
        else:
            shown = self._lines(key, lines) if lines else b""
        if rank == self._asking and splitter.rest and self._terminal[stream]:
            shown += self._update(key, splitter.rest)
        return (self._writer.put(self._descriptors[stream], shown) if shown else True) and room

    def last_error(self, rank: int) -> str:
        """The last line that the rank has written to stderr, or its end; "" if there is none."""
        return printable(self._last_errors.get(rank, b"").decode(errors="replace"), LAST_ERROR_BYTES)

    def finish(self, rank: int, stream: Stream) -> None:
        """The stream has ended: shows its last line, if that has no end of line."""
        key = (rank, stream)
        shown = b"".join(self._line(key, text) for text, _ in self._splitters.pop(key, LineSplitter()).finish())
        if key in self._pending:
            shown += self._line(key, b"")
        if shown:
            self._writer.put(self._descriptors[stream], shown)

    def note(self, sentence: str) -> None:
        """Shows a line of the launcher itself, on stderr."""
        if self._job is not None:
            sentence = line_of("info", "horovodrun", sentence.removeprefix("horovodrun: "), job=self._job)
        else:
            sentence = for_people(sentence)
        self._writer.put(self._descriptors["stderr"], self._above_status(sentence.encode() + b"\n", "stderr"))

    @property
    def has_terminal(self) -> bool:
        """Whether `status` shows anything."""
        return self._terminal["stderr"]

    def status(self, sentence: str) -> None:
        """Shows the launcher's line at the bottom of a terminal; "" removes it. A rank's progress bar replaces it."""
        if not self.has_terminal or self._status not in (None, _LAUNCHER) or self._is_closing:
            return
        terminal, prefix = self._descriptors["stderr"], self._prefix(_LAUNCHER)
        width = 0
        with contextlib.suppress(OSError):  # the terminal is gone
            width = os.get_terminal_size(terminal).columns
        text = printable(sentence).encode()[
            : max((width or 80) - len(prefix) - 1, 0)
        ]  # a longer text would wrap, and its first line would stay on the screen
        if text == self._pending.get(_LAUNCHER, b""):
            return
        if text:
            self._pending[_LAUNCHER], self._status = text, _LAUNCHER
            self._writer.put(terminal, b"\r" + prefix + text + b"\x1b[K")
        else:
            del self._pending[_LAUNCHER]
            self._status = None
            self._writer.put(terminal, b"\r\x1b[K")

    def close(self, timeout_s: float | None = None) -> bool:
        """Removes the status and waits until everything is written; False when the rest was dropped after `timeout_s`.

        No status is shown any more, as the writer may drop what it still gets.
        """
        self.status("")
        self._is_closing = True
        written = self._writer.close(timeout_s)
        if written:
            for descriptor in self._files.values():
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            self._files.clear()
        return written

    def _on_room(self) -> None:
        self.room()  # set by the supervisor after the console was made

    def _prefix(self, key: tuple[int, Stream]) -> bytes:
        rank, stream = key
        if key == _LAUNCHER:
            return b"horovodrun: "
        when = time.strftime("%a %b %d %H:%M:%S %Y", self._wall_clock()) if self._timestamps else ""
        return f"{when}[{rank}]<{stream}>:".encode()

    def _lines(self, key: tuple[int, Stream], lines: bytes) -> bytes:
        """As `_line` for each of them, where no update and no status is to be replaced."""
        self._shown_at[key] = self._clock()
        prefix = self._prefix(key)
        return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"

    def _line(self, key: tuple[int, Stream], text: bytes) -> bytes:
        replaced = self._pending.pop(key, b"")
        self._shown_at[key] = self._clock()
        if self._status == key:
            self._status = None
            return b"\r" + self._prefix(key) + (text or replaced) + b"\x1b[K\n"
        return self._above_status(self._shown(key, text or replaced) + b"\n", key[1])

    def _shown(self, key: tuple[int, Stream], text: bytes) -> bytes:
        if self._job is None:
            return self._prefix(key) + text
        if text.startswith(b'{"time": "') and text.endswith(b"}"):
            return text  # written by Horovod in that process, so it names the rank already
        rank, stream = key
        message = text.decode(errors="backslashreplace")
        return line_of("info", f"horovodrun.{stream}", message, job=self._job, rank=rank).encode()

    def _update(self, key: tuple[int, Stream], text: bytes) -> bytes:
        if not text:
            return b""
        self._pending[key] = text
        if self._terminal[key[1]]:
            self._pending.pop(_LAUNCHER, None)
            self._status = key
            return b"\r" + self._prefix(key) + text + b"\x1b[K"
        now = self._clock()
        if now - self._shown_at.setdefault(key, now) < UPDATE_INTERVAL_S:
            return b""
        self._shown_at[key] = now
        return self._shown(key, text) + b"\n"

    def _above_status(self, line: bytes, stream: Stream) -> bytes:
        if self._status is None or not self._terminal[stream]:
            return line
        return b"\r\x1b[K" + line + self._prefix(self._status) + self._pending[self._status]

    def _open_files(self, directory: Path, size: int) -> None:
        width = len(str(size - 1))
        try:
            for rank in range(size):
                folder = directory / f"rank.{rank:0{width}d}"
                folder.mkdir(parents=True, exist_ok=True)
                streams: tuple[Stream, Stream] = ("stdout", "stderr")
                for stream in streams:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                    self._files[rank, stream] = os.open(folder / stream, flags, 0o666)
        except OSError as error:
            for descriptor in self._files.values():
                os.close(descriptor)
            sentence = (
                f"--output-filename {str(directory)!r} is not usable as the folder for output: {error.strerror} "
                f"({error.filename})."
            )
            raise ValueError(coded(LaunchCode.OUTPUT_UNUSABLE, sentence)) from error
