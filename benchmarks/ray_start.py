"""How long workers on Ray take to start, and what a call costs, beside Ray Train's TorchTrainer (benchmarks/ray.py).

Ray is one of its own, which runs already; so is the Python that Ray keeps ready for the first actors. All workers share
this machine's processors. In each round, one after the other:

  started        RayExecutor.start(), until all actors have their places
  first step     from the beginning of start() to the end of the first allreduce on the last rank, without a framework
  with torch     the same with horovod.torch, whose import is most of it
  TorchTrainer   from fit() to the end of the first all_reduce (Gloo) on the last rank
  execute        the round trip of an empty function, by the median of 200
  told           from the death of a worker by SIGKILL, in an allreduce, until run() raises
  recovered      from that death until shutdown() and start() have made new workers, and those have taken a step
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from horovod.ray import RayExecutor

CALLS = 200


def figures(sizes: Sequence[int], rounds: int, with_trainer: bool) -> dict[str, list[float]]:
    """Seconds of all rounds, by the number of workers and the names above. Starts a Ray of its own."""
    found: dict[str, list[float]] = {}
    # A controller of Ray Train takes no processor, but Ray gives one to each actor that asks for none.
    ray.init("local", num_cpus=max(sizes) + 1, include_dashboard=False, log_to_driver=False)
    try:
        for size in sizes:
            for _ in range(rounds):
                for name, seconds in one_round(size, with_trainer).items():
                    found.setdefault(f"{size} workers: {name}", []).append(seconds)
    finally:
        ray.shutdown()
    return found


def one_round(size: int, with_trainer: bool) -> dict[str, float]:
    """Seconds, by the names above."""
    found = {}
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=size)
    began = time.time()
    executor.start()
    found["started"] = time.time() - began
    found["first step"] = max(executor.run(step)) - began
    trips = []
    for _ in range(CALLS):
        called = time.perf_counter()
        executor.execute(nothing)
        trips.append(time.perf_counter() - called)
    found["execute"] = statistics.median(trips)

    there: list[int] = []  # processes of ranks that train
    killed_s = 0.0

    def kill_one(said: dict[str, Any]) -> None:
        nonlocal killed_s
        there.append(said["pid"])
        if len(there) == size:
            killed_s = time.time()
            os.kill(there[-1], signal.SIGKILL)

    try:
        executor.run(until_killed, callbacks=[kill_one])
    except RayActorError:
        found["told"] = time.time() - killed_s
    executor.shutdown()
    executor.start()
    found["recovered"] = max(executor.run(step)) - killed_s
    executor.shutdown()

    began = time.time()
    executor.start()
    found["with torch"] = max(executor.run(step_of_torch)) - began
    executor.shutdown()
    if with_trainer:
        found["TorchTrainer"] = trainer(size)
    return found


def trainer(size: int) -> float:
    """Seconds from fit() to the end of the first step."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        TorchTrainer(
            step_of_trainer,
            train_loop_config={"folder": folder},
            scaling_config=ScalingConfig(num_workers=size),
            run_config=RunConfig(storage_path=f"{folder}/results"),
        ).fit()
        ends = [float(path.read_text()) for path in Path(folder).glob("rank-*")]
    assert len(ends) == size
    return max(ends) - began


# -- on ranks ----------------------------------------------------------------------------------------------------------


def nothing(_: Any) -> None:
    pass


def allreduce() -> float:
    """The number of ranks."""
    from array import array

    from horovod._core import OpSpec
    from horovod.worker.runtime.context import current

    ones = array("f", [1.0])
    pointer = ones.buffer_info()[0]
    current().engine.submit(OpSpec(0), "allreduce.one", [(pointer, pointer, 7, (1,))]).result()
    return ones[0]


def step() -> float:
    from horovod.common import basics as hvd

    hvd.init()
    assert allreduce() == hvd.size()
    return time.time()


def step_of_torch() -> float:
    import torch

    import horovod.torch as hvd

    hvd.init()
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == hvd.size()
    return time.time()


def step_of_trainer(config: dict[str, str]) -> None:
    import torch

    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    assert float(ones) == torch.distributed.get_world_size()
    Path(config["folder"], f"rank-{torch.distributed.get_rank()}").write_text(str(time.time()))


def until_killed() -> None:
    from horovod.ray import ray_logger

    step()
    ray_logger.log({"pid": os.getpid()})
    while True:
        allreduce()
