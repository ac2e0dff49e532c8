"""Functions that run on ranks. They do without PyTorch, whose import would be most of each start."""

from __future__ import annotations

import os
import signal
from array import array
from collections.abc import Callable
from typing import Any

# What whoever has started the Ray of the tests had in its environment.
INHERITED = {"HOROVOD_RANK": "7", "HOROVOD_FUSION_THRESHOLD": "4096", "OMPI_COMM_WORLD_RANK": "5", "SLURM_PROCID": "3"}
SEATS = 3.0  # a resource of the node beside processors and GPUs
VARIABLES = ("HOROVOD_", "OMPI_", "SLURM_", "CUDA_VISIBLE_DEVICES", "OWN_")


def allreduce(name: str, value: float = 1.0) -> float:
    """The sum over all ranks."""
    from horovod._core import OpSpec
    from horovod.worker.runtime.context import current

    data = array("f", [value])
    pointer = data.buffer_info()[0]
    current().engine.submit(OpSpec(0), f"allreduce.{name}", [(pointer, pointer, 7, (1,))]).result()
    return data[0]


def place(value: Any = None) -> dict[str, Any]:
    from horovod.common import basics as hvd

    hvd.init()
    from horovod.worker.runtime.context import current

    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local": (hvd.local_rank(), hvd.local_size()),
        "cross": (hvd.cross_rank(), hvd.cross_size()),
        "sum": allreduce("place", float(hvd.rank())),
        "host": os.environ["HOROVOD_HOSTNAME"],
        "epoch": current().world.epoch,
        "pid": os.getpid(),
        "value": value,
    }


def place_and_log() -> dict[str, Any]:
    from horovod.ray import ray_logger

    ray_logger.log({"pid": os.getpid()})
    return place()


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}


def fail() -> None:
    raise ZeroDivisionError("out of coffee")


def gpus() -> tuple[str, list[str]]:
    """The one that a script takes by its local rank, and those that Ray has given to this actor."""
    import ray

    own = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    place_here = place()
    return os.environ["CUDA_VISIBLE_DEVICES"].split(",")[place_here["local"][0]], own


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def until_told(fail: Callable[[], Any] | None = None, failing_rank: int = 1, raises: bool = False) -> str:
    """Reduces until a peer is lost, and returns or raises what was said of it. One rank fails once all are there."""
    from horovod.common import basics as hvd
    from horovod.common.exceptions import HorovodInternalError
    from horovod.ray import ray_logger

    hvd.init()
    rank = hvd.rank()
    try:
        allreduce("begin")
        ray_logger.log({"begun": rank, "pid": os.getpid()})
        if fail is not None and rank == failing_rank:
            fail()
    except HorovodInternalError as early:  # the other rank was faster
        error: RuntimeError = early
    else:
        error = lost()
    if raises:
        raise error
    return str(error)


def lost() -> RuntimeError:
    """What operations raise once a peer is lost."""
    try:
        while True:
            allreduce("again")
    except RuntimeError as error:
        return error


class Stateful:
    """An executable that joins in its constructor."""

    def __init__(self, start: int, step: int = 1) -> None:
        from horovod.common import basics as hvd

        hvd.init()
        self.own = os.environ.get("OWN_VARIABLE")
        self.count, self.step = start, step

    def advance(self) -> float:
        self.count += self.step
        return allreduce("advance", float(self.count))


def train_until(stop: str) -> dict[str, Any]:
    """Elastic: a step and a commit, again and again, until there is a file of this name. Each step is logged. The rank
    whose process id is the end of a file's name raises.
    """
    from horovod.common import basics as hvd
    from horovod.common.elastic import ObjectState, run_fn
    from horovod.common.ops.objects import allgather_object, broadcast_object
    from horovod.common.process_sets import global_process_set as everyone
    from horovod.ray import ray_logger
    from horovod.worker.runtime.context import current

    def send(value: Any, root_rank: int = 0) -> Any:
        return broadcast_object(value, root_rank, None, everyone)

    class State(ObjectState):
        def sync(self) -> None:
            self._choose_source(lambda value, name: allgather_object(value, name, everyone))
            super().sync()

    hvd.init()
    started = hvd.rank()
    state = State(send, hvd.rank, batch=0)

    def loop(state: Any) -> None:
        while not allreduce("stop", float(os.path.exists(stop))):
            state.batch += 1
            if os.path.exists(f"{stop}-{os.getpid()}"):
                fail()
            seen = {"pid": os.getpid(), "host": os.environ["HOROVOD_HOSTNAME"], "epoch": current().world.epoch}
            ray_logger.log({**seen, "rank": hvd.rank(), "size": hvd.size(), "batch": state.batch, "started": started})
            state.commit()

    run_fn(loop, hvd.join_again)(state)
    return {"pid": os.getpid(), "rank": hvd.rank(), "size": hvd.size(), "batch": state.batch}
