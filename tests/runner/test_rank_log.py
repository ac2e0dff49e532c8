"""The log of one rank: what is kept, what is held, what a reader gets, and a disk without room."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from horovod.worker.agent.log import LogReader, RankLog

SEGMENT = 4096


def make(folder: Path, *, held: bool = False, limit: int = 4 * SEGMENT) -> RankLog:
    return RankLog(folder, limit_bytes=limit, segment_bytes=SEGMENT, held=held, clock=lambda: 1.5)


def read_all(folder: Path, end: int, position: int = 0, most: int = 1000) -> tuple[bytes, int, int]:
    """All bytes from `position`, where they ended, and how many were gone."""
    reader, content, gone = LogReader(folder), b"", 0
    while position < end:
        records, skipped = reader.read(position, end, most)
        gone += skipped
        position = records[-1].position if records else position + skipped
        content += b"".join(record.data for record in records)
    return content, position, gone


def test_what_was_written_is_read(tmp_path: Path) -> None:
    log = make(tmp_path)
    assert log.append(0, b"out\n")
    assert log.append(1, b"\x00err\xff")
    records, skipped = LogReader(tmp_path).read(0, log.end, 1 << 20)
    assert [(record.stream, record.data, record.written_at) for record in records] == [
        (0, b"out\n", 1.5),
        (1, b"\x00err\xff", 1.5),
    ]
    assert (records[-1].position, skipped) == (log.end, 0)
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["0" * 20]
    assert (tmp_path / ("0" * 20)).stat().st_size == log.end


def test_the_oldest_goes_first(tmp_path: Path) -> None:
    log = make(tmp_path)
    for number in range(1000):
        assert log.append(0, b"line %04d\n" % number)
    content, position, gone = read_all(tmp_path, log.end)
    assert position == log.end
    assert gone > 0
    assert content.endswith(b"line 0998\nline 0999\n")
    assert len(list(tmp_path.iterdir())) <= 6
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 6 * SEGMENT


def test_a_held_log_waits_for_its_reader_and_loses_nothing(tmp_path: Path) -> None:
    log = make(tmp_path, held=True)
    written, content, position = [], b"", 0
    for number in range(3000):
        line = b"line %04d\n" % number
        written.append(line)
        room = log.append(0, line)
        while not room:
            part, position, gone = read_all(tmp_path, log.end, position)
            content += part
            assert gone == 0
            room = log.hold(position)
    part, position, _ = read_all(tmp_path, log.end, position)
    assert content + part == b"".join(written)
    assert len(list(tmp_path.iterdir())) <= 6


def test_a_log_that_is_let_go_has_room_again(tmp_path: Path) -> None:
    log = make(tmp_path, held=True)
    while log.append(0, b"x" * 1000):
        pass
    assert not log.append(0, b"more")
    assert log.hold(None)
    assert read_all(tmp_path, log.end)[0].endswith(b"more")


def test_a_long_write_is_cut_into_records(tmp_path: Path) -> None:
    log = RankLog(tmp_path, limit_bytes=8 << 20, segment_bytes=1 << 20)
    data = os.urandom(3_000_000)
    assert log.append(2, data)
    content, _, gone = read_all(tmp_path, log.end, most=100_000)
    assert (content, gone) == (data, 0)


def test_a_full_disk_keeps_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = make(tmp_path)

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    for number in range(1000):
        assert log.append(0, b"line %04d\n" % number)
    content, position, _ = read_all(tmp_path, log.end)
    assert position == log.end
    assert content.endswith(b"line 0999\n")
    assert len(list(tmp_path.iterdir())) == 2  # no more than were there when the disk filled up


def test_a_full_disk_holds_the_rank_while_a_reader_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = make(tmp_path, held=True)

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    content, position, waits = b"", 0, 0
    for number in range(1000):
        room = log.append(0, b"line %04d\n" % number)
        while not room:
            waits += 1
            part, position, gone = read_all(tmp_path, log.end, position)
            content += part
            assert gone == 0
            room = log.hold(position)
    content += read_all(tmp_path, log.end, position)[0]
    assert content == b"".join(b"line %04d\n" % number for number in range(1000))
    assert waits > 1


def test_a_disk_that_is_full_from_the_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        make(tmp_path / "log")
    assert list((tmp_path / "log").iterdir()) == []


def test_a_reader_that_comes_after_the_end_was_deleted(tmp_path: Path) -> None:
    log = make(tmp_path)
    log.append(0, b"gone")
    for path in tmp_path.iterdir():
        path.unlink()
    assert LogReader(tmp_path).read(0, log.end, 100) == ([], log.end)
