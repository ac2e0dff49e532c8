"""The wheels of a release, by Python and machine, and the interpreters on this host that can build them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
WORK: Final = ROOT / "build" / "release"
REQUIRED: Final = ("3.10", "3.11", "3.12", "3.13")  # a release without one of them is refused
OPTIONAL: Final = ("3.14", "3.14t")  # built where an interpreter is
MACHINES: Final = ("x86_64", "aarch64")
GLIBC: Final = (2, 28)  # of Debian 10, RHEL 8 and Ubuntu 18.10; what is newer than it has this or a newer one

# Which Python it is; a file that pyenv put there for a version that is not chosen ends with an error.
_QUESTION: Final = """
import json, sys, sysconfig, os
flags = sys.abiflags
header = os.path.join(sysconfig.get_path("include"), "Python.h")
number = f"{sys.version_info[0]}.{sys.version_info[1]}{flags}"
print(json.dumps([sys.implementation.name, number, os.path.exists(header)]))
"""


@dataclass(frozen=True)
class Target:
    python: str  # "3.12", "3.14t"
    machine: str  # as `uname -m` says it

    @property
    def abi(self) -> str:
        """cp312, cp314t."""
        return "cp" + self.python.replace(".", "")

    @property
    def interpreter(self) -> str:
        """The first of the wheel's tags: it does not say whether Python is free-threaded."""
        return self.abi.rstrip("t")

    @property
    def platform(self) -> str:
        return f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{self.machine}"

    @property
    def extension_suffix(self) -> str:
        """What CPython appends to the names of extension modules."""
        return f".cpython-{self.abi.removeprefix('cp')}-{self.machine}-linux-gnu.so"

    @property
    def is_of_this_machine(self) -> bool:
        return self.machine == os.uname().machine

    def __str__(self) -> str:
        return f"Python {self.python}, {self.machine}"


def _candidates(python: str) -> Iterator[Path]:
    """Interpreters on PATH, then those that pyenv and uv have installed, the newest first."""
    if found := shutil.which(f"python{python}"):
        yield Path(found)
    folders = (
        Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions"),
        Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local/share/uv/python")),
    )
    for folder in folders:
        installed = folder.glob(f"*/bin/python{python}")
        yield from sorted(installed, key=lambda path: [int(n) for n in re.findall(r"\d+", str(path))], reverse=True)


def interpreter_for(python: str) -> Path | None:
    """A CPython `python` with its headers; None where this host has none."""
    for path in _candidates(python):
        done = subprocess.run(
            [path, "-c", _QUESTION], check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode == 0 and json.loads(done.stdout) == ["cpython", python, True]:
            return path
    return None
