#!/usr/bin/env python3
"""Spark: how soon a job takes its first step, and how soon all hear of a task that dies.

    python benchmarks/spark.py                       two minutes; needs PyTorch and Java
    python benchmarks/spark.py --without-torch       without what it is compared with, Spark's TorchDistributor
    python benchmarks/spark.py --quick               does everything work? The figures mean nothing

Milliseconds of each round, in jobs of --np tasks of a local Spark whose Python workers run already:

    first step    from run() to the end of the first allreduce on the last rank, without a framework
    with torch    the same with horovod.torch, whose import is most of it
    peers raise   from the death of rank 1 by SIGKILL until all other ranks, in an allreduce, have raised
    run raises    from that death until run() raises in the driver
    survivors     from such a death in an elastic job to the end of the first step without that process on the last rank
    replaced      the same of the first world that has the process of the task that Spark runs again

With "executor" in their names, the process of rank 1 dies with its executor (local-cluster), which gets SIGKILL. With
TorchDistributor in their names, the same of a function that uses torch.distributed with Gloo. All processes share this
machine's processors, and its monotonic clock.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
from py4j.protocol import Py4JJavaError
from pyspark import SparkConf
from pyspark import cloudpickle as cloudpickle_of_spark
from pyspark.sql import SparkSession

import horovod.spark


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, help="tasks of a job")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the least of everything")
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args(argv)
    rounds = 1 if options.quick else options.rounds
    with_torch = not (options.quick or options.without_torch)
    if (load := os.getloadavg()[0]) > 0.7:
        print(f"The load is {load:.1f}: other programs disturb these figures.")
    for module in (cloudpickle, cloudpickle_of_spark):  # tasks have another import path
        module.register_pickle_by_value(sys.modules[main.__module__])
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    logging.getLogger("horovod.spark").setLevel(logging.ERROR)
    size, figures = options.np, Figures()
    with spark(f"local[{size},{rounds + 4}]"):
        job(step, size)  # Spark's Python workers start
        for _ in range(rounds):
            figures.add("first step", first_step(job, step, size))
            figures.take("", one_dies(job, until_raised, size, "process"))
        for _ in range(rounds):
            figures.take("", elastic(size, "process"))
        for _ in range(min(rounds, 5) if with_torch else 0):
            figures.add("with torch", first_step(job, step_of_torch, size))
            figures.add("with torch, TorchDistributor", first_step(distributor, step_of_distributor, size))
            figures.take(", TorchDistributor", one_dies(distributor, until_distributor_raises, size, "process"))
    with spark(f"local-cluster[{size},1,1024]"):
        job(step, size)
        for _ in range(min(rounds, 5)):
            figures.take(", executor", one_dies(job, until_raised, size, "executor"))
            figures.take(", executor", elastic(size, "executor"))
    figures.show()
    if options.json:
        Path(options.json).write_text(json.dumps({"load_at_start": load, "seconds": figures.seconds}, indent=1))
    return 0


class Figures:
    """Seconds of all rounds, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    def take(self, ending: str, found: dict[str, float]) -> None:
        for name, seconds in found.items():
            self.add(name + ending, seconds)

    def show(self) -> None:
        for name, seconds in self.seconds.items():
            median, worst = statistics.median(seconds) * 1000, max(seconds) * 1000
            print(f"{name:<32} median {median:9.1f} ms   worst {worst:9.1f} ms   of {len(seconds)}", flush=True)


# -- in the driver -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def spark(master: str) -> Iterator[None]:
    """A Spark of this program's own."""
    conf = SparkConf().setMaster(master).setAppName("benchmark").set("spark.ui.enabled", "false")
    conf.set("spark.ui.showConsoleProgress", "false").set("spark.executor.memory", "450m")
    conf.set("spark.task.maxFailures", "100").set("spark.python.worker.faulthandler.enabled", "false")
    session = SparkSession.builder.config(conf=conf).getOrCreate()  # TorchDistributor asks for one
    session.sparkContext.setLogLevel("OFF")
    try:
        yield
    finally:
        session.stop()


def job(function: Callable[..., Any], size: int, *args: Any) -> Any:
    return horovod.spark.run(function, args, num_proc=size, stdout=Nowhere(), stderr=Nowhere())


def distributor(function: Callable[..., Any], size: int, *args: Any) -> Any:
    from pyspark.ml.torch.distributor import TorchDistributor

    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        return TorchDistributor(num_processes=size, local_mode=False, use_gpu=False).run(function, *args)


class Nowhere:
    def write(self, text: str) -> None: ...


Run = Callable[..., Any]


def first_step(run: Run, function: Callable[..., Any], size: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        run(function, size, folder)
        return max(told(folder, "step", size)) - began


def one_dies(run: Run, function: Callable[..., Any], size: int, victim: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(RuntimeError, Py4JJavaError):  # the latter from TorchDistributor
            run(function, size, folder, victim)
        ended = time.monotonic()
        (killed,) = told(folder, "killed", 1)
        return {"peers raise": max(told(folder, "raised", size - 1)) - killed, "run raises": ended - killed}


def elastic(size: int, victim: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        horovod.spark.run_elastic(
            steps, (folder, victim), num_proc=size, min_num_proc=size - 1, stdout=Nowhere(), stderr=Nowhere()
        )
        (killed,) = told(folder, "killed", 1)
        return {
            "survivors": max(told(folder, "survivors", size - 1)) - killed,
            "replaced": max(told(folder, "replaced", size)) - killed,
        }


def told(folder: str, what: str, count: int) -> list[float]:
    """What so many ranks have written with `tell`."""
    found = [float(path.read_text()) for path in Path(folder).glob(f"{what}-*")]
    assert len(found) == count, f"{len(found)} ranks told {what!r}, not {count}"
    return found


# -- on ranks ----------------------------------------------------------------------------------------------------------


def tell(folder: str, what: str, at_s: float) -> None:
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        file.write(str(at_s))
    os.replace(file.name, os.path.join(folder, f"{what}-{os.getpid()}"))


def allreduce(value: float = 1.0) -> float:
    """The sum over all ranks."""
    from array import array

    from horovod._core import OpSpec
    from horovod.worker.runtime.context import current

    data = array("f", [value])
    pointer = data.buffer_info()[0]
    current().engine.submit(OpSpec(0), "allreduce.one", [(pointer, pointer, 7, (1,))]).result()
    return data[0]


def step(folder: str = "") -> None:
    from horovod.common import basics as hvd

    hvd.init()
    assert allreduce() == hvd.size()
    if folder:
        tell(folder, "step", time.monotonic())


def step_of_torch(folder: str) -> None:
    import torch

    import horovod.torch as hvd

    hvd.init()
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == hvd.size()
    tell(folder, "step", time.monotonic())


def step_of_distributor(folder: str) -> None:
    import torch

    torch.distributed.init_process_group("gloo")
    torch.distributed.all_reduce(torch.ones(1))
    tell(folder, "step", time.monotonic())


def die(folder: str, victim: str) -> None:
    """Kills this process, or the executor above it, and waits for the end."""
    import psutil

    ours = psutil.Process()
    pid = ours.pid if victim == "process" else next(one.pid for one in ours.parents() if one.name() == "java")
    tell(folder, "killed", time.monotonic())
    os.kill(pid, signal.SIGKILL)
    signal.pause()


def reduce_until(folder: str, victim: str, rank: int, reduce: Callable[[], Any]) -> None:
    for _ in range(100):
        reduce()
    if rank == 1:
        die(folder, victim)
    try:
        while True:
            reduce()
    except Exception:
        tell(folder, "raised", time.monotonic())
        raise


def until_raised(folder: str, victim: str) -> None:
    from horovod.common import basics as hvd

    hvd.init()
    reduce_until(folder, victim, hvd.rank(), allreduce)


def until_distributor_raises(folder: str, victim: str) -> None:
    import torch

    torch.distributed.init_process_group("gloo")
    ones = torch.ones(1)
    reduce_until(folder, victim, torch.distributed.get_rank(), lambda: torch.distributed.all_reduce(ones))


def steps(folder: str, victim: str) -> None:
    """Until a process that is new has taken a step."""
    from horovod.common import basics as hvd
    from horovod.common.elastic import ObjectState, run_fn
    from horovod.common.ops.objects import broadcast_object
    from horovod.common.process_sets import global_process_set
    from horovod.worker.runtime.context import current

    hvd.init()
    state = ObjectState(
        lambda value, root_rank=0: broadcast_object(value, root_rank, None, global_process_set),
        hvd.rank,
        size=hvd.size(),
    )
    is_new = os.environ["HOROVOD_INCARNATION"] != "1"
    begun = current().world.epoch

    def train(state: ObjectState) -> None:
        seen = 0
        while True:
            new = allreduce(float(is_new))
            now, epoch = time.monotonic(), current().world.epoch
            if new:
                tell(folder, "replaced", now)
                return
            if epoch != begun and not seen:
                tell(folder, "survivors", now)
                seen = epoch
            if epoch == begun and hvd.rank() == 1:
                die(folder, victim)
            state.commit()

    run_fn(train, hvd.join_again)(state)


if __name__ == "__main__":
    sys.exit(main())
