"""What ranks print goes to sys.stdout and sys.stderr as the caller has them, whatever these are."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
import threading
from typing import Any

import pytest
from test_function import by_value

import horovod
from horovod.launch.__main__ import run_commandline


def speak() -> None:
    rank = os.environ["HOROVOD_RANK"]
    print("out", rank, flush=True)
    print("err", rank, file=sys.stderr, flush=True)
    os.write(1, b"no text: \xff\xc3\n\xe2\x82\xac without an end")


def _spoken(prefix: str = "") -> list[str]:
    lines = ["out 0", "no text: \\xff\\xc3", "\N{EURO SIGN} without an end"]
    return [f"{prefix}[0]<stdout>:{line}" for line in lines]


def test_redirected_streams() -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        horovod.run(by_value(speak), verbose=True)
    assert out.getvalue().splitlines() == _spoken()
    assert err.getvalue().splitlines()[0] == "horovod.run: starting 1 processes"
    assert "[0]<stderr>:err 0" in err.getvalue().splitlines()


def test_pytest_sees_it(capsys: pytest.CaptureFixture[str]) -> None:
    horovod.run(by_value(speak), num_proc=2)
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines())[:3] == sorted(_spoken())
    assert sorted(captured.err.splitlines()) == ["[0]<stderr>:err 0", "[1]<stderr>:err 1"]


class _Cell:
    """As a notebook has it: no buffer, a descriptor that leads elsewhere, and the thread decides what it belongs to."""

    encoding = "ascii"

    def __init__(self) -> None:
        self.text = ""
        self.threads: set[threading.Thread] = set()

    def write(self, text: str) -> None:
        text.encode(self.encoding)
        self.threads.add(threading.current_thread())
        self.text += text

    def flush(self) -> None:
        pass

    def fileno(self) -> int:
        raise AssertionError("nobody has to ask")


def test_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = _Cell()
    monkeypatch.setattr(sys, "stdout", cell)

    async def notebook() -> None:
        horovod.run(by_value(speak))

    asyncio.run(notebook())
    assert cell.text.splitlines()[:1] == ["[0]<stdout>:out 0"]
    assert "[0]<stdout>:\\u20ac without an end\n" in cell.text
    assert cell.threads == {threading.current_thread()}


@pytest.mark.parametrize("closed", [False, True])
def test_streams_that_take_nothing(closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = None
    if closed:
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    said = pytest.warns(RuntimeWarning, match="closed file") if closed else contextlib.nullcontext()
    with said:
        assert horovod.run(by_value(lambda: print("x") or 5)) == [5]


def test_much_and_a_stream_that_is_slow_to_take_it() -> None:
    lines = 20_000

    def flood() -> None:
        for number in range(lines):
            print(number, "x" * 100)

    taken = io.StringIO()
    with contextlib.redirect_stdout(taken):
        horovod.run(by_value(flood), num_proc=2)
    assert len(taken.getvalue().splitlines()) == 2 * lines


def test_a_write_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the caller writes: the ranks are stopped, and it is raised."""

    class Interrupts(io.StringIO):
        def write(self, text: str) -> int:
            if "out" in text and not self.getvalue():
                super().write("interrupted")
                raise KeyboardInterrupt
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Interrupts())
    with pytest.raises(KeyboardInterrupt):
        horovod.run(by_value(speak))


def _launch(*arguments: str) -> int | str | None:
    try:
        run_commandline(["-np", "2", *arguments])
    except SystemExit as end:
        return end.code
    return 0


PRINT = [sys.executable, "-c", "import os, sys; print('hello'); sys.exit(int(os.environ['HOROVOD_RANK']))"]


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_the_launcher_in_this_process(in_a_loop: bool, capsys: pytest.CaptureFixture[str]) -> None:
    async def notebook() -> int | str | None:
        return _launch(*PRINT)

    assert (asyncio.run(notebook()) if in_a_loop else _launch(*PRINT)) == 1
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == ["[0]<stdout>:hello", "[1]<stdout>:hello"]
    assert "rank 1" in captured.err.lower()
