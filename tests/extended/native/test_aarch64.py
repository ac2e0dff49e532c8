"""The engine compiles for 64-bit ARM, warnings included. Nothing here runs there: that takes such a machine.

The cross compiler is Clang with glibc's headers, both from the PyPI package ziglang.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from native_builds import ROOT

SOURCES = ROOT / "csrc"
OBJECTS = ROOT / "build" / "aarch64"
CACHE = OBJECTS / "cache"  # so that a second run compiles only what has changed
WARNINGS = ("-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror")
EM_AARCH64 = 183  # elf(5)

pytestmark = pytest.mark.timeout(600)


def sources() -> list[Path]:
    """Those of the target horovod_engine: all but the bindings (Python's headers) and Gloo's plug-in (Gloo's)."""
    cmake = (SOURCES / "CMakeLists.txt").read_text()
    folders = re.findall(r"\$\{CMAKE_CURRENT_SOURCE_DIR\}/([\w/]+)/\*\.cc", cmake)
    return sorted(path for folder in folders if folder != "bindings" for path in (SOURCES / folder).glob("*.cc"))


def compile_one(source: Path) -> str:
    """What the compiler has to say; nothing when all is well."""
    built = OBJECTS / source.relative_to(SOURCES).with_suffix(".o")
    built.parent.mkdir(parents=True, exist_ok=True)
    compiler = (sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu")
    # Zig has no use for -fsyntax-only, and without optimization the objects take little longer.
    options = ("-std=c++20", "-c", "-O0", "-g0", "-fPIC", *WARNINGS, f"-I{SOURCES}")
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(CACHE), "ZIG_LOCAL_CACHE_DIR": str(CACHE)}
    command = (*compiler, *options, str(source), "-o", str(built))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if done.returncode or done.stdout:
        return f"{source.relative_to(ROOT)}:\n{done.stdout}"
    machine = int.from_bytes(built.read_bytes()[18:20], "little")
    return "" if machine == EM_AARCH64 else f"{built} is for machine {machine} of ELF, not for {EM_AARCH64}"


def test_every_source_of_the_engine_compiles_for_aarch64() -> None:
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("no cross compiler here: pip install ziglang; `make test` does")
    listed = sources()
    assert {"base", "kernels", "transport", "collectives", "engine"} <= {path.parent.name for path in listed}
    with ThreadPoolExecutor(2) as pool:
        complaints = [complaint for complaint in pool.map(compile_one, listed) if complaint]
    assert not complaints, "\n".join(complaints)
