"""Runs of tests that pytest-timeout can't end: each says which test it was, and ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import ctypes, os, signal
import pytest

def test_that_hangs():
    {hang}

@pytest.mark.parametrize("number", range(20))
def test_others(number):
    pass
"""
CONFTEST = """
import hung_tests

hung_tests.MARGIN_S = 1

def pytest_configure(config):
    hung_tests.register(config, {silent_s})
"""
WAITS_WITH_THE_GIL = """
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    lock(mutex), lock(mutex)
"""


@pytest.mark.parametrize(
    ("hang", "silent_s", "says"),
    [
        (WAITS_WITH_THE_GIL, 60, ["test_that_hangs", "in test_that_hangs", "crashed while running", "20 passed"]),
        ("os.kill(os.getpid(), signal.SIGSTOP)", 5, ["No test has ended for 5 s", "test_that_hangs", " stopped "]),
    ],
    ids=["keeps the GIL", "is stopped"],
)
def test_the_run_ends(tmp_path: Path, hang: str, silent_s: float, says: list[str]) -> None:
    (tmp_path / "test_some.py").write_text(TESTS.format(hang=hang))
    (tmp_path / "conftest.py").write_text(CONFTEST.format(silent_s=silent_s))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {Path(__file__).parents[2]}\n")
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "--timeout", "1"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode != 0
    for part in says:
        assert part in run.stdout + run.stderr
