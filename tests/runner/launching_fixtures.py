"""Fixtures of tests that start launchers, for the conftest.py of every folder that has such tests."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import Launched

HEADER = """
import os, signal, sys, time
rank = int(os.environ['HOROVOD_RANK'])
def wait_for_signals():
    while True:
        time.sleep(0.05)  # signal.pause() would miss one that comes just before it
"""


@pytest.fixture
def launch() -> Iterator[Callable[..., Launched]]:
    """launch(*arguments) starts a launcher and returns at once."""
    started: list[Launched] = []

    def start(*arguments: str, **options: object) -> Launched:
        started.append(Launched(*arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for launched in started:
        launched.clean_up()


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], list[str]]:
    """program(source) is the command that runs it; it may use what HEADER defines."""

    def write(source: str) -> list[str]:
        path = tmp_path / "program.py"
        path.write_text(HEADER + source)
        return [sys.executable, str(path)]

    return write


@pytest.fixture(autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """A shell that runs the tests in the background ignores SIGINT for them, which the launchers would inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
