"""Builds programs and libraries of tests/native with CMake, from the objects that `make build` has compiled.

`python tests/native_builds.py` builds all of them in one run, which uses all processors; `make test` does that first.
With an argument, such as address,undefined, it builds a tree of its own with those sanitizers.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
# Where `make build` builds: build-dir in pyproject.toml.
BUILD = ROOT / "build" / f"{_PYTHON}-{_PYTHON}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


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


def fuzz(program: Path, cases: int, seeds: Sequence[int]) -> None:
    """So many cases of each of these seeds, which run at once: most of the time they wait for silent peers."""
    with ThreadPoolExecutor(len(seeds)) as pool:
        for _ in pool.map(lambda seed: run(str(program), str(cases), str(seed)), seeds):
            pass


@contextlib.contextmanager
def locked(folder: Path = BUILD) -> Iterator[None]:
    """Alone in a build folder, which has no lock of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def sanitized(sanitizers: str) -> Path:
    """A configured build folder with these sanitizers, that of `make sanitize`."""
    folder = ROOT / "build" / f"sanitize-{sanitizers}"
    with locked(folder):
        run(
            *(tool("cmake"), "-S", str(ROOT / "csrc"), "-B", str(folder), "-G", "Ninja"),
            *("-DCMAKE_BUILD_TYPE=None", "-DHOROVOD_TESTS=ON", f"-DHOROVOD_SANITIZE={sanitizers}"),
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        )
    return folder


@functools.cache
def build(target: str, folder: Path = BUILD) -> Path:
    """The freshly built program. Targets are built one by one, so that one broken test breaks only itself."""
    if not (folder / "build.ninja").exists():
        pytest.skip(f"{folder} is not configured; `make build` does that")
    with locked(folder):
        run(tool("cmake"), "--build", str(folder), "--target", target)
    return folder / "native" / target


def gpu_libraries() -> tuple[Path, Path]:
    """The stand-ins for libcuda.so.1 and libnccl.so.2 (tests/native/gpu); libstandin_nvrtc.so is beside them."""
    folder = build("standin_nccl").parent
    return folder / "libstandin_cuda.so", folder / "libstandin_nccl.so"


def build_all(folder: Path, targets: list[str]) -> None:
    """What can't be built is left out: the test of it will say so."""
    with locked(folder):
        command = [tool("cmake"), "--build", str(folder), "-j", str(os.cpu_count()), "--target", *targets]
        subprocess.run([*command, "--", "-k", "0"], stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    build_all(sanitized(sys.argv[1]) if len(sys.argv) > 1 else BUILD, sys.argv[2:] or ["native_tests"])
