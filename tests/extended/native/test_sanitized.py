"""C++ tests and fuzzers with AddressSanitizer and UBSan; `make sanitize` runs all of it, for longer, and with TSan."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from native_builds import ROOT, build, fuzz, run, sanitized

FUZZERS = sorted(path.stem for path in (ROOT / "tests" / "native").glob("fuzz_*.cc"))

pytestmark = pytest.mark.timeout(1500)


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


@pytest.mark.parametrize("program", ["engine_stress", "gpu_engine_test", *FUZZERS])
def test_with_sanitizers(program: str, tmp_path: Path) -> None:
    if not has_sanitizer(tmp_path):
        pytest.skip("the compiler has no AddressSanitizer")
    built = build(program, sanitized("address,undefined"))
    if program in FUZZERS:
        fuzz(built, 375, [5, 6, 7, 8])  # not the cases of tests/native/test_native.py
    else:
        run(str(built), *(["16"] if program == "engine_stress" else []))
