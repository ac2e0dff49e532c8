"""C++ tests and fuzzers with AddressSanitizer and UBSan; `make sanitize` runs all of it, for longer, and with TSan.

The libraries that TensorFlow and JAX load are run in it, with ASan and with TSan. These two and Python are not compiled
with a sanitizer, so its library comes first (LD_PRELOAD), and before theirs the C++ library, whose exceptions ASan
wants to see. TSan can't see the locks of code that was not compiled with it, so it leaves that code out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from native_builds import ROOT, build, fuzz, run, sanitized, tool

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


# Ranks that train different weights are told so: the comparison runs in the middle of a compiled step.
_BEGIN = """
import sys, warnings
from pathlib import Path
from horovod import _core
_core.__file__ = str(Path(sys.argv[1]) / "_core.so")  # the libraries are beside it
"""
_END = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(24):
        train()
    finish()
hvd.join()  # comparisons begin anew
train()
finish()
told = sum("[different-weights]" in str(one.message) for one in caught)
loaded = any(sys.argv[1] in line and "libhorovod_" in line for line in open("/proc/self/maps"))
print("rank", hvd.rank(), "told", told, "sanitized", loaded, flush=True)
"""
_STEPS = {
    "tensorflow": """
import tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
weight = tf.Variable([[1.0 + hvd.rank()]])
@tf.function
def train():
    with tf.GradientTape() as tape:
        loss = weight * weight
    weight.assign_sub(0.1 * hvd.DistributedGradientTape(tape).gradient(loss, weight))
def finish():
    pass
""",
    "jax": """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, optax
import horovod.jax as hvd
hvd.init()
optimizer = hvd.DistributedOptimizer(optax.adam(0.1))
@jax.jit
def step(params, state):
    updates, state = optimizer.update(params, state, params)
    return optax.apply_updates(params, updates), state
params = {"w": jnp.ones(3) + hvd.rank()}
state = optimizer.init(params)
def train():
    global params, state
    params, state = step(params, state)
def finish():
    jax.block_until_ready(params)
""",
}
_RUNTIMES = {"address,undefined": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}
_OPTIONS = {
    # Python keeps memory until the end. TensorFlow has equal names of its own.
    "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:report_signal_unsafe=0",
}


def _shared(name: str) -> str:
    """A library of the compiler."""
    compiler = shutil.which("gcc")
    found = "" if compiler is None else run(compiler, f"-print-file-name={name}").strip()
    if not os.path.isabs(found):
        pytest.skip(f"the compiler has no {name}")
    return str(Path(found).resolve())


@pytest.mark.parametrize("sanitizers", _RUNTIMES)
@pytest.mark.parametrize("framework", _STEPS)
def test_the_library_of_a_framework_with_sanitizers(framework: str, sanitizers: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    preloaded = " ".join(map(_shared, [*_RUNTIMES[sanitizers], "libstdc++.so.6"]))
    folder = sanitized(sanitizers)
    build(f"horovod_{framework}", folder)
    script = tmp_path / "train.py"
    script.write_text(_BEGIN + _STEPS[framework] + _END)
    options = [f"{name}={value}" for name, value in _OPTIONS.items()]
    rank = ["env", f"LD_PRELOAD={preloaded}", *options, sys.executable, str(script), str(folder)]
    printed = run(tool("horovodrun"), "-np", "2", *rank)
    assert "rank 0 told 1 sanitized True" in printed, printed
    assert "rank 1 told 0 sanitized True" in printed, printed
    assert "WARNING: ThreadSanitizer" not in printed
