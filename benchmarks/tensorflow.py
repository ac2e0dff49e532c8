#!/usr/bin/env python3
"""TensorFlow on two ranks of this host: Horovod and TensorFlow's own MultiWorkerMirroredStrategy in one run.

    python benchmarks/tensorflow.py                     six minutes; needs TensorFlow, PyTorch and a C compiler
    python benchmarks/tensorflow.py --parts operations  about a minute
    python benchmarks/tensorflow.py --quick             does everything work? The figures mean nothing

Operations, beside the engine called from C:

    call, eager       one call after the other
    call, function    the slope of a chain in one tf.function: one call of a function costs far more than an operation
    ResNet-50         its 161 gradients in one tf.function, less the same function without the operations. They are
                      arguments, so the results take other memory, which the engine is measured with, too; "just
                      computed" in the function, as a tape's are, they are reduced in place
    variables         hvd.broadcast_variables of variables of these sizes, beside the engine's broadcast in place

A rank has one thread of TensorFlow, unless TF_NUM_INTEROP_THREADS and TF_NUM_INTRAOP_THREADS say otherwise: idle ones
spin, and take a processor from another rank where there are no more processors than ranks.

Each figure is the median of the rounds on rank 0. Horovod and the engine take turns in one pair of processes; the
strategy has a pair of its own, before and after them.

Training, in loops of tf.function (model.fit of Keras 3 fails with the strategy): the columns are those of
benchmarks/training.py, which also tells how parameters are checked. The same processes train in each way, in turns of
a few steps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder, whose tensorflow.py is this file

from benchmarks.cases import resnet50_shapes  # noqa: E402
from benchmarks.operations import BROADCAST, Figures, Rounds, engine_call, print_figures, seconds_of  # noqa: E402

SMALL, LARGE, CHAIN = 256, 1 << 18, 100  # float32: 1 KB and 1 MB; operations in a chain
WORLD = 2
DEADLINE_SECONDS = 400
THREADS = {"TF_NUM_INTEROP_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
PARTS = ("operations", "training")
ORDER = ("strategy", "horovod", "strategy")
RESULTS = ROOT / "benchmarks/results"
OTHER_MEMORY = "engine from C, other memory"
COLUMNS = ("engine from C", OTHER_MEMORY, "Horovod", "Horovod, grouped", "MultiWorkerMirroredStrategy")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    if options.rank_of == "horovod":
        return _horovod(options.rounds)
    if options.rank_of == "strategy":
        return _strategy(options.rounds)
    from benchmarks import report

    return report.until_interrupted(lambda: _run(options))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="of the operations (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round, tiny models")
    parser.add_argument("--json", type=Path, default=RESULTS / "tensorflow.json", help="default: %(default)s")
    parser.add_argument("--rank-of", choices=("horovod", "strategy"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.parts = options.parts.split(",")
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"--parts: {part!r} is none of the parts; there are {', '.join(PARTS)}.")
    if options.rounds < 1:
        parser.error(f"--rounds: {options.rounds} is no number of rounds; expected 1 or more.")
    if options.quick:
        options.rounds = 1
    return options


def _run(options: argparse.Namespace) -> int:
    from benchmarks import report, tensorflow_training

    about = report.machine({})
    print(f"load of this machine: {about['load_at_start']:.1f}, {about['cores']} processors", flush=True)
    found: Figures = {}
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    if "operations" in options.parts:
        found = _operations(("strategy", "horovod") if options.quick else ORDER, options.rounds, failures)
        print_figures(found, COLUMNS)
    if "training" in options.parts:
        rows = tensorflow_training.run(options.quick, about["versions"], failures)
    document = {
        "machine": about,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "operations": found,
        "rows": rows,
        "failures": failures,
    }
    report.write_json(options.json, document)
    print(f"written to {options.json}; load of this machine: {os.getloadavg()[0]:.1f}")
    return 1 if failures else 0


def _operations(order: Sequence[str], rounds: int, failures: list[str]) -> Figures:
    found: Figures = {}
    for who in order:
        try:
            figures = _measured(who, rounds)
        except RuntimeError as error:
            failures.append(str(error))
            print(error)
            continue
        for row, columns in figures.items():
            for column, seconds in columns.items():
                kept = found.setdefault(row, {})
                kept[column] = min(seconds, kept.get(column, seconds))
    return found


def _measured(who: str, rounds: int) -> Figures:
    """Two processes; rank 0 prints its figures. RuntimeError if one failed."""
    from benchmarks.ports import free_ports

    command = [sys.executable, str(Path(__file__).resolve()), "--rank-of", who, "--rounds", str(rounds)]
    environment = {**THREADS, **os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as output:
        if who == "horovod":
            launcher = [sys.executable, "-m", "horovod.launch", "-np", str(WORLD)]
            started = [subprocess.Popen([*launcher, *command], stdout=output, env=environment)]
        else:
            workers = [f"127.0.0.1:{port}" for port in free_ports(WORLD)]
            started = []
            for index in range(WORLD):
                task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
                environment["TF_CONFIG"] = json.dumps(task)
                stdout = output if index == 0 else subprocess.DEVNULL
                started.append(subprocess.Popen(command, stdout=stdout, stderr=subprocess.DEVNULL, env=environment))
        try:
            for process in started:
                if process.wait(DEADLINE_SECONDS) != 0:
                    raise RuntimeError(f"The operations of {who} ended with {process.returncode}.")
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"The operations of {who} took more than {DEADLINE_SECONDS} seconds.") from None
        finally:
            for process in started:
                process.kill()
        output.seek(0)
        lines = [line[line.index("{") :] for line in output if '"figures"' in line]
    figures: Figures = json.loads(lines[0])["figures"]
    return figures


# -- Horovod and the engine --------------------------------------------------------------------------------------------
def _horovod(rounds: int) -> int:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()
    measured = Rounds()
    for row, elements, times in (("1 KB", SMALL, 300), ("1 MB", LARGE, 20)):
        x = tf.ones([elements])
        measured.add(f"call of {row}, eager", "engine from C", engine_call(f"e{row}", [elements], times))
        measured.add(
            f"call of {row}, eager", "Horovod", lambda x=x, times=times: seconds_of(lambda: _sum(hvd, x, None), times)
        )
    measured.add("call of 1 KB, function", "engine from C", engine_call("chain", [SMALL], 300))
    measured.add("call of 1 KB, function", "Horovod", _slope(lambda x, name: _sum(hvd, x, name)))

    gradients = [tf.ones(shape) for shape in resnet50_shapes()]
    sizes = [int(tf.size(one)) for one in gradients]
    measured.add("ResNet-50", "engine from C", engine_call("resnet", sizes, 5))
    measured.add("ResNet-50", OTHER_MEMORY, engine_call("resnet.other", sizes, 5, in_place=False))

    def single(tensors: list[Any]) -> list[Any]:
        return [_sum(hvd, one, f"resnet.{place}") for place, one in enumerate(tensors)]

    measured.add("ResNet-50", "Horovod", _set(single, gradients))
    measured.add("ResNet-50, just computed", "engine from C", engine_call("resnet", sizes, 5))
    measured.add("ResNet-50, just computed", "Horovod", _set(lambda g: single(_computed(g)), gradients, _computed))
    measured.add(
        "ResNet-50, just computed",
        "Horovod, grouped",
        _set(lambda g: hvd.grouped_allreduce(_computed(g), op=hvd.Sum), gradients, _computed),
    )
    measured.add("ResNet-50", "Horovod, grouped", _set(lambda g: hvd.grouped_allreduce(g, op=hvd.Sum), gradients))

    variables = [tf.Variable(one) for one in gradients]
    measured.add("ResNet-50, variables", "engine from C", engine_call("variables", sizes, 5, BROADCAST))
    measured.add(
        "ResNet-50, variables",
        "Horovod",
        lambda: seconds_of(lambda: hvd.broadcast_variables(variables, root_rank=0), 5),
    )
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
    return lambda: (seconds_of(lambda: long(x), 10) - seconds_of(lambda: short(x), 10)) / CHAIN


def _unchanged(tensors: list[Any]) -> list[Any]:
    import tensorflow as tf

    return [tf.identity(one) for one in tensors]


def _computed(tensors: list[Any]) -> list[Any]:
    return [one * 0.5 for one in tensors]


def _set(
    operation: Callable[[list[Any]], Any],
    gradients: list[Any],
    otherwise: Callable[[list[Any]], list[Any]] = _unchanged,
) -> Callable[[], float]:
    """Seconds that the operation adds to a function that would do `otherwise`."""
    import tensorflow as tf

    with_it, without = tf.function(operation, autograph=False), tf.function(otherwise, autograph=False)
    return lambda: seconds_of(lambda: with_it(gradients), 5) - seconds_of(lambda: without(gradients), 5)


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
        measured.add(row, column, lambda x=x, times=times: seconds_of(lambda: step(x), times))
    gradients = [tf.ones(shape) for shape in resnet50_shapes()]
    measured.add("ResNet-50", column, lambda: seconds_of(lambda: step(gradients), 2))
    found = measured.run(rounds)
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
        print(json.dumps({"figures": found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
