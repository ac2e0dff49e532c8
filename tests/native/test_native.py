"""The C++ tests, each a program of its own, linked to the objects of the Python module.

Some run again with AddressSanitizer and UBSan, in tests/extended; `make sanitize` runs all of it and for longer.
How they are built is in native_builds.py.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import tiers
from native_builds import BUILD, build, fuzz, run, tool

PROGRAMS = sorted(path.stem for path in Path(__file__).parent.glob("*_test.cc"))
FUZZERS = sorted(path.stem for path in Path(__file__).parent.glob("fuzz_*.cc"))
LONG = ["mesh_endings_test", "sparse_reductions_test", "sparse_rows_test"]  # of the second tier
BENCHMARKS = sorted(path.stem for path in Path(__file__).parent.glob("*_bench.cc"))

pytestmark = pytest.mark.timeout(1500)


@pytest.mark.longer
@pytest.mark.parametrize("program", tiers.pick([name for name in PROGRAMS if name not in LONG], LONG))
def test_program(program: str) -> None:
    run(str(build(program)))


@pytest.mark.parametrize("program", BENCHMARKS)
def test_benchmark_builds(program: str) -> None:
    build(program)


@pytest.mark.longer
@pytest.mark.parametrize("program", FUZZERS)
def test_hostile_bytes_end_in_a_status(program: str) -> None:
    fuzz(build(program), *tiers.pick((300, [1]), (1_250, [1, 2, 3, 4])))


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
