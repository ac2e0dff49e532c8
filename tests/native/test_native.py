"""The C++ tests, each a program of its own: built once with CMake, then run. No Python module is involved.

Some run a second time, shortly, with AddressSanitizer and UBSan; `make sanitize` runs all of it and for longer.
How they are built is in native_builds.py.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from native_builds import BUILD, ROOT, build, run, tool

SANITIZED = ROOT / "build" / "sanitize-address,undefined"  # that of `make sanitize`
PROGRAMS = sorted(path.stem for path in Path(__file__).parent.glob("*_test.cc"))
FUZZERS = sorted(path.stem for path in Path(__file__).parent.glob("fuzz_*.cc"))
BENCHMARKS = sorted(path.stem for path in Path(__file__).parent.glob("*_bench.cc"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.xdist_group("native")]


def has_sanitizer(tmp_path: Path) -> bool:
    """The compiler may come without the sanitizer's library."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return False
    program = tmp_path / "empty.cc"
    program.write_text("int main() {}")
    built = tmp_path / "empty"
    command = [compiler, "-fsanitize=address,undefined", str(program), "-o", str(built)]
    return subprocess.run(command, capture_output=True).returncode == 0 and subprocess.run([built]).returncode == 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str) -> None:
    run(str(build(program)))


@pytest.mark.parametrize("program", BENCHMARKS)
def test_benchmark_builds(program: str) -> None:
    build(program)


@pytest.mark.parametrize("program", FUZZERS)
def test_hostile_bytes_end_in_a_status(program: str) -> None:
    run(str(build(program)), "3000")


@pytest.mark.parametrize(
    "program",
    [("engine_stress", "16"), *((name, "1500") for name in FUZZERS), ("gpu_engine_test",)],
    ids=lambda program: program[0],
)
def test_with_sanitizers(program: tuple[str, ...], tmp_path: Path) -> None:
    if not has_sanitizer(tmp_path):
        pytest.skip("the compiler has no AddressSanitizer")
    name, *arguments = program
    built = build(name, SANITIZED, "-DCMAKE_BUILD_TYPE=None", "-DHOROVOD_SANITIZE=address,undefined")
    run(str(built), *arguments)


def test_variants_export_only_their_table() -> None:
    """An inline function compiled for AVX-512 and left visible could replace the portable one at link time."""
    if sys.platform != "linux":
        pytest.skip("reads ELF object files")
    nm = tool("nm")
    build("kernels_test")
    objects = sorted(BUILD.glob("**/variant_*.cc.o"))
    assert len(objects) == 3
    for path in objects:
        defined = [line.split()[-1] for line in run(nm, "--defined-only", "--extern-only", str(path)).splitlines()]
        foreign = [symbol for symbol in defined if not re.fullmatch(r"_ZN7horovod7kernels\d+k\w+TableE", symbol)]
        assert not foreign, f"{path} also exports {foreign}"
