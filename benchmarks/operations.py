"""For benchmarks/tensorflow.py and benchmarks/jax.py: measurements that take turns, and the engine called from C."""

from __future__ import annotations

import ctypes
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ALLREDUCE, BROADCAST = 0, 2  # OpType in protos/v1/types.proto
Figures = dict[str, dict[str, float]]  # seconds: a row for each operation, a column for each way to run it

_ROOT = Path(__file__).resolve().parent.parent


def seconds_of(call: Callable[[], object], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) / times


class Rounds:
    """Measurements that take turns."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, str, Callable[[], float]]] = []
        self._times: dict[tuple[str, str], list[float]] = {}

    def add(self, row: str, column: str, measure: Callable[[], float]) -> None:
        measure()  # agreed on, traced, warm
        self._calls.append((row, column, measure))

    def run(self, rounds: int) -> Figures:
        for _ in range(rounds):
            for row, column, measure in self._calls:
                self._times.setdefault((row, column), []).append(measure())
        found: Figures = {}
        for (row, column), times in self._times.items():
            found.setdefault(row, {})[column] = statistics.median(times)
        return found


def print_figures(found: Figures, columns: Sequence[str]) -> None:
    print("| microseconds | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for row, figures in found.items():
        cells = [f"{figures[column] * 1e6:,.0f}" if column in figures else "" for column in columns]
        print(f"| {row} | " + " | ".join(cells) + " |")


def engine_call(
    name: str, elements: list[int], calls: int, kind: int = ALLREDUCE, in_place: bool = True
) -> Callable[[], float]:
    """Measures the seconds of one of `calls` calls, each of all tensors of so many float32 as one operation.

    in_place: the results replace the tensors; else they have memory of their own.
    """
    from horovod import _core

    library = _compiled()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    api = ctypes.c_void_p(pointer(_core.C_API, b"horovod._core.C_API"))
    given = (ctypes.c_int64 * len(elements))(*elements)

    def measure() -> float:
        wire = f"c.{name}".encode()
        seconds = float(library.seconds_for_a_call(api, wire, kind, given, len(elements), calls, in_place))
        if seconds < 0:
            raise RuntimeError("the engine failed")
        return seconds

    return measure


def _compiled() -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("The engine is called from C, which needs a compiler (cc).")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/engine_calls.so"
        source = str(_ROOT / "benchmarks/engine_calls.c")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", f"-I{_ROOT}/csrc", source, "-o", library], check=True)
        loaded = ctypes.CDLL(library)
    loaded.seconds_for_a_call.restype = ctypes.c_double
    return loaded
