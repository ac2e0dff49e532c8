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
COMPILER = (sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu")
# Zig has no use for -fsyntax-only, and without optimization the objects take little longer.
OPTIONS = ("-std=c++20", "-O0", "-g0", "-fPIC")
ENVIRONMENT = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(CACHE), "ZIG_LOCAL_CACHE_DIR": str(CACHE)}

# Compiled once, as most of the time goes into these.
OFTEN_INCLUDED = (
    "algorithm array atomic bit condition_variable cstdint cstring deque functional map memory mutex numeric optional "
    "span string string_view thread unordered_map utility vector"
)

pytestmark = pytest.mark.timeout(600)


def sources() -> list[Path]:
    """Those of the target horovod_engine: all but the bindings (Python's headers) and Gloo's plug-in (Gloo's)."""
    cmake = (SOURCES / "CMakeLists.txt").read_text()
    folders = re.findall(r"\$\{CMAKE_CURRENT_SOURCE_DIR\}/([\w/]+)/\*\.cc", cmake)
    return sorted(path for folder in folders if folder != "bindings" for path in (SOURCES / folder).glob("*.cc"))


def compile_headers() -> Path:
    """What the sources include most often from the standard library, precompiled."""
    OBJECTS.mkdir(parents=True, exist_ok=True)
    header = OBJECTS / "often_included.h"
    header.write_text("".join(f"#include <{name}>\n" for name in OFTEN_INCLUDED.split()))
    compiled = header.with_suffix(".pch")
    command = (*COMPILER, *OPTIONS, "-x", "c++-header", str(header), "-o", str(compiled))
    subprocess.run(command, check=True, env=ENVIRONMENT)
    return compiled


def compile_one(source: Path, headers: Path) -> str:
    """What the compiler has to say; nothing when all is well."""
    built = OBJECTS / source.relative_to(SOURCES).with_suffix(".o")
    built.parent.mkdir(parents=True, exist_ok=True)
    options = (*OPTIONS, *WARNINGS, "-include-pch", str(headers), f"-I{SOURCES}")
    command = (*COMPILER, *options, "-c", str(source), "-o", str(built))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    if done.returncode or done.stdout:
        return f"{source.relative_to(ROOT)}:\n{done.stdout}"
    machine = int.from_bytes(built.read_bytes()[18:20], "little")
    return "" if machine == EM_AARCH64 else f"{built} is for machine {machine} of ELF, not for {EM_AARCH64}"


def test_every_source_of_the_engine_compiles_for_aarch64() -> None:
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("no cross compiler here: pip install ziglang; `make test` does")
    listed = sources()
    assert {"base", "kernels", "transport", "collectives", "engine"} <= {path.parent.name for path in listed}
    headers = compile_headers()
    with ThreadPoolExecutor(2) as pool:
        said = pool.map(lambda source: compile_one(source, headers), listed)
        complaints = [complaint for complaint in said if complaint]
    assert not complaints, "\n".join(complaints)
