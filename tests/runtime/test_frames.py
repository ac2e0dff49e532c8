"""base/frames.py: where another thread stands."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from horovod.base.frames import frame_of


@pytest.fixture
def waiting() -> Iterator[threading.Thread]:
    """A thread that stands in `_waits`."""
    go, stands = threading.Event(), threading.Event()

    def _waits() -> None:
        stands.set()
        go.wait()

    thread = threading.Thread(target=_waits)
    thread.start()
    stands.wait()
    yield thread
    go.set()
    thread.join()


def test_the_frame_of_a_thread(waiting: threading.Thread) -> None:
    frame, names = frame_of(waiting), []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    assert "_waits" in names


def test_a_thread_that_has_not_begun_has_none() -> None:
    assert frame_of(threading.Thread()) is None


class _Garbage:
    """Reachable from itself alone."""

    def __init__(self, collected: Callable[[], None]) -> None:
        self.own, self.collected = self, collected

    def __del__(self) -> None:
        self.collected()


def test_no_garbage_is_collected_while_the_interpreter_is_locked(
    waiting: threading.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before CPython 3.11.8 a finalizer that lets go of the GIL there hangs the process."""
    is_locked, collected = False, {True: 0, False: 0}
    current_frames = sys._current_frames

    def locked() -> dict[int, FrameType]:
        nonlocal is_locked
        is_locked = True
        try:
            for _ in range(5):
                _Garbage(count)
            return current_frames()
        finally:
            is_locked = False

    def count() -> None:
        collected[is_locked] += 1

    monkeypatch.setattr(sys, "_current_frames", locked)
    threshold = gc.get_threshold()
    gc.set_threshold(1)  # each new object may collect the others
    try:
        for _ in range(5):
            frame_of(waiting)
    finally:
        gc.set_threshold(*threshold)
    assert collected[False] > 0
    assert collected[True] == 0
    assert gc.isenabled()
