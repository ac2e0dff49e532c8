"""A Python with MXNet, made once for the whole repository, in which the package that is tested is the one of the tests.

It lies in build/, is made anew when constraints.txt has changed, and holds links to the package: an edit is seen at
once, and nothing is built for it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
_UNREACHABLE = re.compile(r"NewConnectionError|ConnectTimeoutError|ReadTimeoutError|from versions: none")


@functools.cache
def python() -> Path:
    """Its interpreter. The test is skipped, with the reason, where there is none."""
    if sys.version_info >= (3, 12):
        pytest.skip("MXNet 1.9.1 needs NumPy 1.23, which is not for this Python")
    pins = CONSTRAINTS.read_bytes()
    folder = ROOT / "build" / "mxnet" / hashlib.sha256(pins + sys.version.encode()).hexdigest()[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:  # of several processes of pytest, one makes it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder)
            (folder / "made").touch()
        _link(folder)
    return folder / "bin" / "python"


def _make(folder: Path) -> None:
    packages = re.findall(r"^([\w-]+)==", CONSTRAINTS.read_text(), re.MULTILINE)
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    done = _run(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python"),
        *("install", "--quiet", "--no-compile", "--only-binary", ":all:", "--constraint", CONSTRAINTS, *packages),
    )
    if done.returncode and _UNREACHABLE.search(done.stdout):
        pytest.skip(f"MXNet can't be had here: {done.stdout.splitlines()[-1]}")
    assert done.returncode == 0, done.stdout
    # Python compiles what is imported, as most of what is installed never is.
    done = _run(folder / "bin" / "python", "-c", "import mxnet, pytest, sklearn.datasets, sklearn.model_selection")
    assert done.returncode == 0, done.stdout


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
    )


def _link(folder: Path) -> None:
    (packages,) = folder.glob("lib/python*/site-packages")
    package = packages / "horovod"
    package.mkdir(exist_ok=True)
    wanted = dict(_parts())
    for link in set(package.iterdir()) - {package / name for name in (*wanted, "__pycache__")}:
        link.unlink()
    for name, part in wanted.items():
        link = package / name
        if not link.is_symlink() or link.readlink() != part:
            link.unlink(missing_ok=True)
            link.symlink_to(part)


def _parts() -> Iterator[tuple[str, Path]]:
    """Name in the package, and where it lies: an editable package is spread over the repository."""
    import horovod
    import horovod.protos

    for folder in map(Path, horovod.__path__):
        parts = [ROOT / name for name in ("base", "coordinator", "worker")] if folder == ROOT else folder.iterdir()
        for part in parts:
            if part.name not in ("__pycache__", "protos"):
                yield part.name, part
    yield "protos", Path(horovod.protos.__path__[0])
