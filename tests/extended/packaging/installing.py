"""Commands in environments of their own, which know nothing of the one that the tests run in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_UNREACHABLE = re.compile(r"NewConnectionError|ConnectTimeoutError|ReadTimeoutError|from versions: none")


def finished(*command: str | Path, **options: str) -> subprocess.CompletedProcess[str]:
    """With stdout and stderr together. options: `cwd`, and variables of the environment."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HOROVOD_"))}
    return subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=options.pop("cwd", None),
        env={**environ, **options},
    )


def run(*command: str | Path, **options: str) -> str:
    """What it printed; it must succeed."""
    done = finished(*command, **options)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def pip(programs: Path) -> list[str | Path]:
    """The pip of this environment, for the one with this bin folder: one of its own would take seconds to install."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", programs / "python"]


@contextmanager
def environment(folder: Path, *packages: str | Path) -> Iterator[Path]:
    """The bin folder of a new environment with these packages, as pip resolves them; it is removed afterwards.

    Nothing is compiled to bytecode before it is imported. The test is skipped where there is no package index.
    """
    programs = folder / "bin"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    try:
        done = finished(*pip(programs), "install", "--quiet", "--no-compile", *packages)
        if done.returncode and _UNREACHABLE.search(done.stdout):
            pytest.skip(f"no package index here: {done.stdout.splitlines()[-1]}")
        assert done.returncode == 0, done.stdout
        assert "No broken requirements found" in run(*pip(programs), "check")
        yield programs
    finally:
        shutil.rmtree(folder, ignore_errors=True)
