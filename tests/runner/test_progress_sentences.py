"""What a person sees while ranks join: on a terminal, and elsewhere."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import DEADLINE_S, LAUNCHER, Launched

from horovod.launch.console.report import FIRST_LINE_S, PlainLines, Seen, hosts_sentence, sentence
from horovod.worker.agent.output import Console, Writer

ONE_LATER = """
from horovod.common import basics as hvd
if rank == 1:
    open(sys.argv[1]).close()  # until the test has seen what it waits for
hvd.init()
"""


@pytest.mark.parametrize(
    ("seen", "hosts", "words"),
    [
        (Seen(1), ["a", "a"], "1 of 2 processes started; missing: rank 1"),
        (Seen(2), ["a", "a", "b", "b"], "2 of 4 processes started; missing: ranks 2 and 3 on b"),
        (Seen(4), ["a", "a", "b", "b"], ""),
        (Seen(3, frozenset({0, 2})), ["a"] * 3, "2 of 3 ranks have joined; waiting for rank 1"),
        (
            Seen(4, frozenset({0})),
            ["a", "a", "b", "b"],
            "1 of 4 ranks have joined; waiting for rank 1 on a and ranks 2 and 3 on b",
        ),
        (Seen(2, frozenset({0, 1}), formed=True), ["a", "a"], ""),
    ],
)
def test_sentences(seen: Seen, hosts: list[str], words: str) -> None:
    assert sentence(seen, hosts) == words


def test_hosts_that_connect() -> None:
    hosts = ["a", "b", "c"]
    assert hosts_sentence({"b"}, hosts) == "1 of 3 hosts are ready; waiting for a and c"
    assert hosts_sentence(set(hosts), hosts) is None


def test_the_missing_of_many_hosts_are_few_words() -> None:
    text = sentence(Seen(64, frozenset({0})), [f"host{rank // 2}" for rank in range(64)])
    assert text.endswith(
        "rank 1 on host0, ranks 2 and 3 on host1, ranks 4 and 5 on host2, ranks 6 and 7 on host3 and 28 more"
    )


def test_plain_lines_come_ever_less_often() -> None:
    lines = PlainLines(every_change=False)
    told = [second for second in range(100) if lines.due("1 of 2" if second >= 10 else "", float(second))]
    assert told == [10 + FIRST_LINE_S, 10 + 2 * FIRST_LINE_S, 10 + 4 * FIRST_LINE_S]
    assert lines.due("1 of 2", 500) == "1 of 2, for 490 s now."


def test_plain_lines_of_each_change() -> None:
    lines = PlainLines(every_change=True)
    assert [lines.due(text, 0) for text in ("", "a", "a", "b", "", "b")] == ["", "a.", "", "b.", "", "b."]


def test_verbose_tells_who_is_missing(launch: Callable[..., Launched], program: Callable, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    launched = launch("-np", "2", "--verbose", *program(ONE_LATER), str(fifo))
    assert launched.process.stderr is not None
    while "joined" not in (line := launched.process.stderr.readline()):
        assert line, "the launcher ended"
    assert line == "horovodrun: 1 of 2 ranks have joined; waiting for rank 1.\n"
    fifo.open("w").close()
    code, _, err = launched.finish()
    assert (code, "joined" in err) == (0, False)


def test_a_line_at_the_bottom_of_a_terminal(program: Callable, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    master, terminal = pty.openpty()
    command = [*LAUNCHER, "-np", "2", *program(ONE_LATER + "print('done', flush=True)\n"), str(fifo)]
    environ = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, env=environ) as process:
        os.close(terminal)
        try:
            shown = b""
            line = b"\rhorovodrun: 1 of 2 ranks have joined; waiting for rank 1\x1b[K"
            while line not in shown:
                shown += os.read(master, 4096)
            fifo.open("w").close()
            rest = b""
            while True:
                try:
                    rest += os.read(master, 4096)
                except OSError:  # the last process that had the terminal is gone
                    break
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            os.close(master)
    assert b"\r\x1b[K" in rest, "the line goes away"
    final = re.sub(rb"[^\n]*\r\x1b\[K", b"", rest.replace(b"\r\n", b"\n"))
    assert sorted(final.splitlines()) == [b"[0]<stdout>:done", b"[1]<stdout>:done"]


def test_the_line_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, terminal = os.openpty()
    console = Console(Writer(), descriptors=(terminal, terminal))
    console.status("1 of 2")
    console.status("1 of 2")
    console.feed(0, "stdout", b"hello\n")
    console.note("a note")
    console.feed(0, "stderr", b"\r 5%\r 6%")
    console.status("2 of 2")  # a progress bar has the place
    console.status("")
    assert console.close(DEADLINE_S)
    os.write(terminal, b"\x04end")
    shown = b""
    while not shown.endswith(b"\x04end"):
        shown += os.read(master, 4096)
    os.close(master)
    os.close(terminal)
    assert shown.removesuffix(b"\x04end").replace(b"\r\n", b"\n") == (
        b"\rhorovodrun: 1 of 2\x1b[K"
        b"\r\x1b[K[0]<stdout>:hello\nhorovodrun: 1 of 2"
        b"\r\x1b[Ka note\nhorovodrun: 1 of 2"
        b"\r[0]<stderr>: 5%\x1b[K"
    )


def all_of(master: int) -> bytes:
    """What a terminal has got whose last process is gone."""
    shown = b""
    with contextlib.suppress(OSError):
        while data := os.read(master, 4096):
            shown += data
    os.close(master)
    return shown


def test_the_line_ends_with_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may be over before its world was seen to stand."""
    monkeypatch.setenv("TERM", "xterm")
    master, terminal = os.openpty()
    console = Console(Writer(), descriptors=(terminal, terminal))
    console.status("1 of 2")
    assert console.close(DEADLINE_S)
    console.status("2 of 2")
    console.status("")
    os.close(terminal)
    shown = all_of(master)
    assert shown == b"\rhorovodrun: 1 of 2\x1b[K\r\x1b[K"


def test_a_progress_bar_elsewhere_leaves_the_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`horovodrun ... > log`: that of a rank is in the file, the launcher's line on the terminal."""
    monkeypatch.setenv("TERM", "xterm")
    master, terminal = os.openpty()
    reader, file = os.pipe()
    console = Console(Writer(), descriptors=(file, terminal))
    console.status("1 of 2")
    console.feed(0, "stdout", b"10%\r20%\r30%")
    console.feed(0, "stderr", b"hello\n")
    assert console.close(DEADLINE_S)
    for descriptor in (terminal, file, reader):
        os.close(descriptor)
    shown = all_of(master)
    assert shown.replace(b"\r\n", b"\n") == (
        b"\rhorovodrun: 1 of 2\x1b[K\r\x1b[K[0]<stderr>:hello\nhorovodrun: 1 of 2\r\x1b[K"
    )


def test_a_terminal_that_is_gone_does_not_keep_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, terminal = os.openpty()
    console = Console(Writer(), descriptors=(terminal, terminal))
    console.status("1 of 2")
    os.close(master)
    assert console.close(DEADLINE_S)
    os.close(terminal)


def test_a_pipe_gets_no_line() -> None:
    reader, writer = os.pipe()
    console = Console(Writer(), descriptors=(writer, writer))
    console.status("1 of 2")
    assert not console.has_terminal
    assert console.close(DEADLINE_S)
    os.close(writer)
    assert os.read(reader, 10) == b""
    os.close(reader)
