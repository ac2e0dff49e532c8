"""Starts the real launcher, as a process with pipes, and looks after what it leaves behind; see launching.py."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import DEADLINE_S, run_launcher
from launching_fixtures import interrupts_arrive, launch, program

__all__ = ["interrupts_arrive", "launch", "program"]


@pytest.fixture(scope="session", autouse=True)
def nobody_ignores_sighup() -> None:
    """Where the tests themselves run under nohup, launchers would, as they should."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


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
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=5 * DEADLINE_S)

    return run
