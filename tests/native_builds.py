"""Builds programs and libraries of tests/native with CMake. No Python module is involved.

The build folders stay (under ``build/``), so that a second run compiles only what has changed.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "native-tests"


def tool(name: str) -> str:
    """A build tool, from the environment that runs the tests if it has one."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; `make test` installs it")
    return found


def run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def build(target: str, folder: Path = BUILD, *options: str) -> Path:
    """The freshly built program. Targets are built one by one, so that one broken test breaks only itself."""
    options = options or ("-DCMAKE_BUILD_TYPE=Release", "-DHOROVOD_WERROR=ON")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        configure = [tool("cmake"), "-S", str(ROOT / "csrc"), "-B", str(folder), "-G", "Ninja", "-DHOROVOD_TESTS=ON"]
        run(*configure, *options, f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}")
        run(tool("cmake"), "--build", str(folder), "--target", target)
    return folder / target


def gpu_libraries() -> tuple[Path, Path]:
    """The stand-ins for libcuda.so.1 and libnccl.so.2 (tests/native/gpu); libstandin_nvrtc.so is beside them."""
    build("standin_nccl")
    return BUILD / "libstandin_cuda.so", BUILD / "libstandin_nccl.so"
