"""Lines, progress bars and the thread that writes them."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from pathlib import Path

import pytest
from error_codes import ends_with
from hypothesis import given
from hypothesis import strategies as st
from resources import eventually

from horovod.base.errors import LaunchCode
from horovod.worker.agent.output import UPDATE_INTERVAL_S, Console, LineSplitter, Piece, Writer

DEADLINE_S = 60
F_SETPIPE_SZ = 1031  # fcntl.h; Python names it from 3.10 on


def split(*chunks: bytes, limit: int = 1 << 20) -> list[Piece]:
    splitter = LineSplitter(limit)
    pieces = [piece for chunk in chunks for piece in splitter.feed(chunk)]
    return [*pieces, *splitter.finish()]


def test_lines_and_updates() -> None:
    assert split(b"a\nb\r\nc\rd") == [Piece(b"a", False), Piece(b"b", False), Piece(b"c", True), Piece(b"d", False)]


def test_a_return_at_the_end_of_a_chunk_waits_for_its_newline() -> None:
    assert split(b"a\r", b"\nb\r", b"c") == [Piece(b"a", False), Piece(b"b", True), Piece(b"c", False)]


def test_empty_lines_stay() -> None:
    assert split(b"\n\na\n") == [Piece(b"", False), Piece(b"", False), Piece(b"a", False)]


def test_a_long_line_is_cut() -> None:
    assert split(b"abcdefg\n", limit=3) == [Piece(b"abc", False), Piece(b"def", False), Piece(b"g", False)]


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xc3", b"\x00"]), max_size=30), st.data())
def test_chunks_do_not_matter(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert split(*chunks, limit=4) == split(whole, limit=4)

    splitter, pieces = LineSplitter(4), []
    for chunk in chunks:  # whole lines where there are such
        if (lines := splitter.whole_lines(chunk)) is None:
            pieces += splitter.feed(chunk)
        else:
            pieces += [Piece(line, False) for line in lines.split(b"\n")[:-1]]
    assert [*pieces, *splitter.finish()] == split(whole, limit=4)


class Pipes:
    """A console that writes into two pipes, or two terminals."""

    def __init__(self, *, terminal: bool = False, **options: object) -> None:
        make = os.openpty if terminal else os.pipe
        self.readers, self.writers = zip(*(make() for _ in range(2)), strict=True)
        self.now = 0.0
        self.console = Console(Writer(), descriptors=self.writers, clock=lambda: self.now, **options)  # type: ignore[arg-type]

    def close(self) -> tuple[bytes, bytes]:
        """Everything that was shown on stdout and stderr."""
        assert self.console.close(timeout_s=20)
        shown = []
        for reader, writer in zip(self.readers, self.writers, strict=True):
            os.write(writer, b"\x04end")  # a terminal's other end cannot be read to its end
            data = b""
            while not data.endswith(b"\x04end"):
                data += os.read(reader, 65536)
            shown.append(data.removesuffix(b"\x04end"))
            os.close(writer)
            os.close(reader)
        return shown[0], shown[1]


@pytest.fixture
def pipes() -> Pipes:
    return Pipes()


def test_prefixes(pipes: Pipes) -> None:
    pipes.console.feed(0, "stdout", b"one\ntw")
    pipes.console.feed(11, "stderr", b"oh\n")
    pipes.console.feed(0, "stdout", b"o\nthree")
    pipes.console.finish(0, "stdout")
    assert pipes.close() == (b"[0]<stdout>:one\n[0]<stdout>:two\n[0]<stdout>:three\n", b"[11]<stderr>:oh\n")


def test_timestamps() -> None:
    pipes = Pipes(timestamps=True, wall_clock=lambda: time.struct_time((2024, 2, 29, 1, 2, 3, 3, 60, 0)))
    pipes.console.feed(1, "stdout", b"x\n")
    assert pipes.close()[0] == b"Thu Feb 29 01:02:03 2024[1]<stdout>:x\n"


def test_a_progress_bar_in_a_log_shows_its_last_state(pipes: Pipes) -> None:
    pipes.console.feed(0, "stderr", b"\r 1%\r 50%\r 99%\r100%\nnext\r")
    pipes.console.feed(0, "stderr", b"last\r")
    pipes.console.finish(0, "stderr")
    assert pipes.close()[1] == b"[0]<stderr>:100%\n[0]<stderr>:last\n"


def test_a_progress_bar_in_a_log_gives_a_sign_of_life(pipes: Pipes) -> None:
    for percent in range(4):
        pipes.console.feed(0, "stderr", b"\r%d%%" % percent)
        pipes.now += UPDATE_INTERVAL_S / 2
    pipes.console.feed(0, "stderr", b"\rend\n")
    assert pipes.close()[1].splitlines() == [b"[0]<stderr>:2%", b"[0]<stderr>:end"]


def test_a_line_after_the_last_state_keeps_it(pipes: Pipes) -> None:
    pipes.console.feed(0, "stdout", b"50%\r100%\rx")
    pipes.console.feed(0, "stdout", b"\b \n")
    pipes.console.feed(1, "stdout", b"100%\r")
    pipes.console.feed(1, "stdout", b"\r\n")
    assert pipes.close()[0] == b"[0]<stdout>:x\b \n[1]<stdout>:100%\n"


def test_a_progress_bar_stays_at_the_bottom_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    pipes = Pipes(terminal=True)
    pipes.console.feed(0, "stderr", b"\r 1%\r 2%")
    pipes.console.feed(1, "stderr", b"hello\n")
    pipes.console.feed(0, "stderr", b"\r100%\n")
    shown = pipes.close()[1].replace(b"\r\n", b"\n")
    assert shown == (
        b"\r[0]<stderr>: 1%\x1b[K"
        b"\r\x1b[K[1]<stderr>:hello\n[0]<stderr>: 1%"
        b"\r[0]<stderr>: 2%\x1b[K"
        b"\r[0]<stderr>:100%\x1b[K\n"
    )


def test_files_hold_the_bytes_as_they_came(tmp_path: Path) -> None:
    pipes = Pipes(directory=tmp_path / "out", size=11)
    pipes.console.feed(3, "stdout", b"a\r50%\r100%\nb\xff")
    pipes.console.finish(3, "stdout")
    pipes.console.feed(10, "stderr", b"e\n")
    pipes.close()
    assert (tmp_path / "out/rank.03/stdout").read_bytes() == b"a\r50%\r100%\nb\xff"
    assert (tmp_path / "out/rank.10/stderr").read_bytes() == b"e\n"
    assert len(list((tmp_path / "out").iterdir())) == 11


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    facts = ["--output-filename", f"'{tmp_path}/file'"]
    with pytest.raises(ValueError, match=ends_with(LaunchCode.OUTPUT_UNUSABLE, *facts)):
        Pipes(directory=tmp_path / "file", size=1)
    assert not [thread for thread in threading.enumerate() if thread.name == "horovod-output"]


def test_a_stalled_reader_asks_for_a_pause_and_loses_nothing() -> None:
    reader, descriptor = os.pipe()
    writer = Writer(limit_bytes=1000)
    room = threading.Event()
    writer.room = room.set
    block = b"x" * 200_000  # more than a pipe holds
    assert not writer.put(descriptor, block)
    assert not room.is_set()
    assert not writer.close(timeout_s=0)
    left = len(block)
    while left:
        left -= len(os.read(reader, left))
    assert room.wait(20)
    assert writer.close(timeout_s=20)
    os.close(reader)
    os.close(descriptor)


def test_room_is_told_of_also_when_a_later_piece_had_some() -> None:
    """The piece that had no room asked to be told; one that comes in between, for another descriptor, did not."""
    reader, descriptor = os.pipe()
    fcntl.fcntl(descriptor, F_SETPIPE_SZ, 4096)
    os.write(descriptor, bytes(4096))  # the pipe is full
    writer = Writer(limit_bytes=8192)
    room = threading.Event()
    writer.room = room.set
    assert writer.put(descriptor, bytes(4096))
    assert eventually(lambda: not writer._queue)  # the thread has it, and can't write it
    assert not writer.put(descriptor, bytes(5000))
    os.read(reader, 4096)
    assert eventually(lambda: writer._held == 5000)
    assert writer.put(descriptor, bytes(100))
    left = 4096 + 5000 + 100
    while left:
        left -= len(os.read(reader, 4096))
    assert room.wait(DEADLINE_S)
    assert writer.close(DEADLINE_S)
    os.close(reader)
    os.close(descriptor)


def test_a_reader_that_went_away_is_reported_once() -> None:
    reader, descriptor = os.pipe()
    os.close(reader)
    writer = Writer()
    failures: list[tuple[int, type[OSError]]] = []
    writer.failed = lambda where, error: failures.append((where, type(error)))
    writer.put(descriptor, b"a")
    writer.put(descriptor, b"b")
    assert writer.close(timeout_s=20)
    assert failures == [(descriptor, BrokenPipeError)]
    os.close(descriptor)


def test_lines_as_json_objects_say_whose_they_are(tmp_path: Path) -> None:
    path = tmp_path / "shown"
    with path.open("wb") as file:
        console = Console(Writer(), descriptors=(file.fileno(), file.fileno()), job="digits")
        console.feed(1, "stdout", b'loss "0.5"\xff\n')
        own = b'{"time": "2026-01-01T00:00:00.000Z", "level": "info", "rank": 1}'
        console.feed(1, "stderr", own + b"\n")
        console.note("horovodrun: starting 2 processes")
        assert console.close(20)
    first, second, third = path.read_bytes().splitlines()
    found = json.loads(first)
    assert (found["job"], found["rank"], found["logger"]) == ("digits", 1, "horovodrun.stdout")
    assert found["message"] == 'loss "0.5"\\xff'
    assert second == own
    assert json.loads(third)["message"] == "starting 2 processes"
