"""What csrc/hardening.cmake asks for is in the libraries that a user's process loads."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from horovod import _core

CORE = Path(_core.__file__)
LIBRARIES = sorted({CORE, *CORE.parent.glob("libhorovod_*.so")})


def readelf(*arguments: str) -> str:
    tool = shutil.which("readelf")
    if tool is None:
        pytest.skip("there is no readelf (binutils)")
    return subprocess.run([tool, "--wide", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name.partition(".")[0])
def test_addresses_of_functions_are_read_only(library: Path) -> None:
    assert "GNU_RELRO" in readelf("--segments", str(library))
    assert re.search(r"FLAGS_1\).*\bNOW\b", readelf("--dynamic", str(library)))
    assert re.search(r"GNU_STACK .* RW ", readelf("--segments", str(library))), "the stack must not be executable"


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name.partition(".")[0])
def test_stacks_are_protected(library: Path) -> None:
    assert " __stack_chk_fail" in readelf("--dyn-syms", str(library))


def test_calls_of_libc_are_checked() -> None:
    assert re.search(r" __\w+_chk@", readelf("--dyn-syms", str(CORE)))


def test_the_threads_of_the_program_stay_where_they_are() -> None:
    """Only the engine's own thread is given a processor, by another function, where HOROVOD_THREAD_AFFINITY says so."""
    assert not re.search(r" sched_setaffinity\b", readelf("--dyn-syms", str(CORE)))
