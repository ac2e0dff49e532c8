"""The wheel of this tree, built once for all tests here."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest
from installing import ROOT, run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with the tools of this environment, in the build folder that `make build` has filled.

    The first process of pytest that wants it builds it, and the others wait: the build folder is for one at a time.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel"
    folder.mkdir(exist_ok=True)
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("*.whl")):
            run(
                *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel"),
                *("--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT),
                PATH=tools,
            )
    (built,) = folder.glob("*.whl")
    return built
