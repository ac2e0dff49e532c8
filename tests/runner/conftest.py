"""Starts the real launcher, as a process with pipes, and looks after what it leaves behind; see launching.py."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import DEADLINE_S, Launched, run_launcher

HEADER = """
import os, signal, sys, time
rank = int(os.environ['HOROVOD_RANK'])
def wait_for_signals():
    while True:
        time.sleep(0.05)  # signal.pause() would miss one that comes just before it
"""


@pytest.fixture(scope="session", autouse=True)
def nobody_ignores_sighup() -> None:
    """Where the tests themselves run under nohup, launchers would, as they should."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


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
def horovodrun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """horovodrun(*arguments) runs a launcher to its end."""

    return run_launcher


@pytest.fixture
def installed(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """installed(*arguments) runs the installed command, among files named as modules that it must not import."""
    for name in ("json", "horovod", "pickle", "struct", "typing", "signal", "grpc", "psutil", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current directory')\n")
    (tmp_path / "mine.py").write_text("answer = 42\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("horovodrun")), *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)

    return run


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
