#!/usr/bin/env python3
"""Allreduces of TensorFlow's tensors on two ranks of this host: Horovod, the engine called from C, and TensorFlow's own
MultiWorkerMirroredStrategy, in one run.

    python benchmarks/tensorflow.py             about a minute; needs TensorFlow and a C compiler
    python benchmarks/tensorflow.py --rounds 3  fewer rounds

    call, eager       one call after the other
    call, function    the slope of a chain in one tf.function: one call of a function costs far more than an operation
    ResNet-50         its 161 gradients in one tf.function, less the same function without the operations

Each figure is the median of the rounds on rank 0. Horovod and the engine take turns in one pair of processes; the
strategy has a pair of its own, before and after them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder, whose tensorflow.py is this file

from benchmarks.cases import resnet50_shapes  # noqa: E402

SMALL, LARGE, CHAIN = 256, 1 << 18, 100  # float32: 1 KB and 1 MB; operations in a chain
WORLD = 2
DEADLINE_SECONDS = 400
Figures = dict[str, dict[str, float]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank-of", choices=("horovod", "strategy"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank_of == "horovod":
        return _horovod(options.rounds)
    if options.rank_of == "strategy":
        return _strategy(options.rounds)
    print(f"load of this machine: {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors", file=sys.stderr)
    found: Figures = {}
    for who in ("strategy", "horovod", "strategy"):
        for row, columns in _run(who, options.rounds).items():
            for column, seconds in columns.items():
                kept = found.setdefault(row, {})
                kept[column] = min(seconds, kept.get(column, seconds))
    _print(found)
    return 0


def _print(found: Figures) -> None:
    columns = ["engine from C", "Horovod", "Horovod, grouped", "MultiWorkerMirroredStrategy"]
    print("| microseconds | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for row, figures in found.items():
        cells = [f"{figures[column] * 1e6:,.0f}" if column in figures else "" for column in columns]
        print(f"| {row} | " + " | ".join(cells) + " |")


def _run(who: str, rounds: int) -> Figures:
    """Two processes; rank 0 prints its figures."""
    command = [sys.executable, str(Path(__file__).resolve()), "--rank-of", who, "--rounds", str(rounds)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as output:
        if who == "horovod":
            launcher = [sys.executable, "-m", "horovod.runner.launch", "-np", str(WORLD)]
            started = [subprocess.Popen([*launcher, *command], stdout=output, env=environment)]
        else:
            workers = [f"127.0.0.1:{port}" for port in _free_ports(WORLD)]
            started = []
            for index in range(WORLD):
                task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
                environment["TF_CONFIG"] = json.dumps(task)
                stdout = output if index == 0 else subprocess.DEVNULL
                started.append(subprocess.Popen(command, stdout=stdout, stderr=subprocess.DEVNULL, env=environment))
        try:
            for process in started:
                if process.wait(DEADLINE_SECONDS) != 0:
                    raise SystemExit(f"{who} ended with {process.returncode}")
        finally:
            for process in started:
                process.kill()
        output.seek(0)
        lines = [line[line.index("{") :] for line in output if '"figures"' in line]
    figures: Figures = json.loads(lines[0])["figures"]
    return figures


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _seconds(call: Callable[[], object], times: int) -> float:
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


# -- Horovod and the engine --------------------------------------------------------------------------------------------
def _horovod(rounds: int) -> int:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()
    measured = Rounds()
    for row, elements, times in (("1 KB", SMALL, 300), ("1 MB", LARGE, 20)):
        x = tf.ones([elements])
        measured.add(f"call of {row}, eager", "engine from C", _engine(f"e{row}", [elements], times))
        measured.add(
            f"call of {row}, eager", "Horovod", lambda x=x, times=times: _seconds(lambda: _sum(hvd, x, None), times)
        )
    measured.add("call of 1 KB, function", "engine from C", _engine("chain", [SMALL], 300))
    measured.add("call of 1 KB, function", "Horovod", _slope(lambda x, name: _sum(hvd, x, name)))

    gradients = [tf.ones(shape) for shape in resnet50_shapes()]
    sizes = [int(tf.size(one)) for one in gradients]
    measured.add("ResNet-50", "engine from C", _engine("resnet", sizes, 5))

    def single(tensors: list[Any]) -> list[Any]:
        return [_sum(hvd, one, f"resnet.{place}") for place, one in enumerate(tensors)]

    measured.add("ResNet-50", "Horovod", _set(single, gradients))
    measured.add("ResNet-50", "Horovod, grouped", _set(lambda g: hvd.grouped_allreduce(g, op=hvd.Sum), gradients))
    found = measured.run(rounds)
    if hvd.rank() == 0:
        print(json.dumps({"figures": found}), flush=True)
    hvd.shutdown()
    return 0


def _sum(hvd: Any, x: Any, name: str | None) -> Any:
    return hvd.allreduce(x, op=hvd.Sum, name=name)


def _slope(operation: Callable[[Any, str], Any]) -> Callable[[], float]:
    """Seconds that one more operation in a chain takes."""
    import tensorflow as tf

    def chain(length: int) -> Callable[[Any], Any]:
        @tf.function(autograph=False)
        def run(x: Any) -> Any:
            for link in range(length):
                x = operation(x, f"chain.{link}")
            return x

        return run

    short, long, x = chain(1), chain(1 + CHAIN), tf.zeros([SMALL])
    return lambda: (_seconds(lambda: long(x), 10) - _seconds(lambda: short(x), 10)) / CHAIN


def _set(operation: Callable[[list[Any]], Any], gradients: list[Any]) -> Callable[[], float]:
    import tensorflow as tf

    with_it = tf.function(operation, autograph=False)
    without = tf.function(lambda tensors: [tf.identity(one) for one in tensors], autograph=False)
    return lambda: _seconds(lambda: with_it(gradients), 5) - _seconds(lambda: without(gradients), 5)


def _engine(name: str, elements: list[int], calls: int) -> Callable[[], float]:
    from horovod import _core

    library = _compiled()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    api = ctypes.c_void_p(pointer(_core.C_API, b"horovod._core.C_API"))
    given = (ctypes.c_int64 * len(elements))(*elements)

    def measure() -> float:
        seconds = float(library.seconds_for_a_call(api, f"allreduce.c.{name}".encode(), given, len(elements), calls))
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
        source = str(ROOT / "benchmarks/engine_calls.c")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", f"-I{ROOT}/csrc", source, "-o", library], check=True)
        loaded = ctypes.CDLL(library)
    loaded.seconds_for_a_call.restype = ctypes.c_double
    return loaded


# -- the peer ----------------------------------------------------------------------------------------------------------
def _strategy(rounds: int) -> int:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def reduced(tensors: Any) -> Any:
        mine = tf.nest.map_structure(tf.identity, tensors)  # tensors made outside of run() are not taken
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, mine)

    @tf.function(autograph=False)
    def step(tensors: Any) -> Any:
        return strategy.run(reduced, args=(tensors,))

    measured = Rounds()
    column = "MultiWorkerMirroredStrategy"
    for row, elements, times in (("call of 1 KB, function", SMALL, 20), ("call of 1 MB, eager", LARGE, 10)):
        x = tf.ones([elements])
        measured.add(row, column, lambda x=x, times=times: _seconds(lambda: step(x), times))
    gradients = [tf.ones(shape) for shape in resnet50_shapes()]
    measured.add("ResNet-50", column, lambda: _seconds(lambda: step(gradients), 2))
    found = measured.run(rounds)
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
        print(json.dumps({"figures": found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
