"""Functions that run on ranks. They do without PyTorch, whose import would be most of each start."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import Any


def allreduce(name: str, value: float = 1.0) -> float:
    """The sum over all ranks."""
    from horovod._core import OpSpec
    from horovod.worker.runtime.context import current

    data = array("f", [value])
    pointer = data.buffer_info()[0]
    current().engine.submit(OpSpec(0), f"allreduce.{name}", [(pointer, pointer, 7, (1,))]).result()
    return data[0]


def place(value: Any = None, *variables: str, keyword: Any = None) -> dict[str, Any]:
    """What this rank knows of itself; it also prints its rank."""
    from horovod.common import basics as hvd
    from horovod.spark.task import get_available_devices

    hvd.init()
    print("out", hvd.rank(), flush=True)
    print("err", hvd.rank(), file=sys.stderr, end="", flush=True)
    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local": (hvd.local_rank(), hvd.local_size()),
        "sum": allreduce("place", float(hvd.rank())),
        "pid": os.getpid(),
        "folder": os.getcwd(),
        "python": sys.executable,
        "values": (value, keyword),
        "devices": get_available_devices(),
        "variables": {name: os.environ.get(name) for name in variables},
    }


def executor_pid() -> int:
    """Of the JVM above this process: rank, Python worker of Spark, its daemon, executor."""
    import psutil

    return next(one.pid for one in psutil.Process().parents() if one.name() == "java")


def fail(how: str) -> None:
    """Rank 1 fails once all are there; the others reduce until they are told."""
    from horovod.common import basics as hvd

    if how == "before init" and os.environ["HOROVOD_RANK"] == "1":
        raise ZeroDivisionError("out of coffee")
    hvd.init()
    allreduce("begin")
    if hvd.rank() == 1:
        if how == "raise":
            raise ZeroDivisionError("out of coffee")
        os.kill(executor_pid() if how == "executor" else os.getpid(), signal.SIGKILL)
    while True:
        allreduce("again")


def wait_for(folder: str) -> None:
    """Tells which processes belong to this rank, also by a file in this folder, and reduces until it is ended."""
    from horovod.common import basics as hvd

    hvd.init()
    allreduce("begin")
    print("pids", os.getpid(), os.getppid(), flush=True)
    if folder:
        Path(folder, f"{os.getpid()}.{os.getppid()}").touch()
    while True:
        allreduce("again")


def one_ends_late() -> int:
    """The process of rank 0 ends long before that of rank 1."""
    from horovod.common import basics as hvd

    hvd.init()
    first = int(allreduce("pid", float(os.getpid() if hvd.rank() == 0 else 0)))
    rank = hvd.rank()
    hvd.shutdown()
    if rank == 1:
        _wait_for_the_end_of(first)
    return rank


def _wait_for_the_end_of(pid: int) -> None:
    """Waits until process `pid` has ended, and then twice as long as a driver takes that ends a job without waiting for
    the rank that calls this.
    """
    import psutil

    from horovod.coordinator.core.ending import AFTERMATH_S

    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait()
    time.sleep(2 * AFTERMATH_S)


def grow(size: int) -> dict[str, Any]:
    """Takes steps until a world of `size` has taken one; the sizes that this process saw."""
    from horovod.common import basics as hvd
    from horovod.common.elastic import State, run_fn

    class Nothing(State):
        def save(self) -> None: ...
        def restore(self) -> None: ...
        def sync(self) -> None: ...

    sizes: list[int] = []

    def train(state: Nothing) -> None:
        while (now := int(allreduce("step"))) < size:
            if now not in sizes:
                sizes.append(now)
            state.commit()
        sizes.append(now)

    hvd.init()
    run_fn(train, hvd.join_again)(Nothing(lambda value, root_rank=0: value, hvd.rank))
    return {"sizes": sizes}


def outlive(how: str) -> dict[str, Any]:
    """Slot 0 does the work of the job. how: "stop": slot 1 is stopped before; "raise": it fails after that."""
    from horovod.common import basics as hvd
    from horovod.common.elastic import State, run_fn

    class Nothing(State):
        def save(self) -> None: ...
        def restore(self) -> None: ...
        def sync(self) -> None: ...

    slot = int(os.environ["HOROVOD_RANK"])

    def train(state: Nothing) -> int:
        first = int(allreduce("pid", float(os.getpid() if slot == 0 else 0)))
        if slot == 1 and how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while how == "stop" and allreduce("size") > 1:
            state.commit()
        return first

    hvd.init()
    first = run_fn(train, hvd.join_again)(Nothing(lambda value, root_rank=0: value, hvd.rank))
    hvd.shutdown()
    if slot == 1:
        _wait_for_the_end_of(first)
        raise ZeroDivisionError("out of coffee")
    return {"slot": slot}


def elastic(size: int, steps: int, dies: dict[int, str], at: int = 2) -> dict[str, Any]:
    """Takes steps in worlds of `size`. dies: by slot, how its first process ends after `at` steps; "stop": its worker
    is stopped.
    """
    from horovod.common import basics as hvd
    from horovod.common.elastic import State, run_fn

    class Steps(State):
        """How many steps have been taken; a process that is new has taken none."""

        def __init__(self) -> None:
            super().__init__(lambda value, root_rank=0: value, hvd.rank)
            self.steps = self.saved = 0

        def save(self) -> None:
            self.saved = self.steps

        def restore(self) -> None:
            self.steps = self.saved

        def sync(self) -> None:
            known = allreduce("known", float(self.steps > 0))
            self.steps = int(allreduce("steps", float(self.steps)) // max(known, 1))

    own: list[int] = []

    def train(state: Steps) -> None:
        while state.steps < steps:
            assert allreduce("step") == size
            state.steps += 1
            own.append(state.steps)
            state.save()
            if state.steps == at and os.environ["HOROVOD_INCARNATION"] == "1":
                how = dies.get(int(os.environ["HOROVOD_RANK"]))
                if how == "raise":
                    raise ZeroDivisionError("out of coffee")
                if how == "stop":
                    os.kill(os.getppid(), signal.SIGSTOP)
                elif how is not None:
                    os.kill(executor_pid() if how == "executor" else os.getpid(), signal.SIGKILL)
                if how is not None:
                    threading.Event().wait()  # this process ends with the worker or executor above it

    hvd.init()
    run_fn(train, hvd.join_again)(Steps())
    return {"slot": int(os.environ["HOROVOD_RANK"]), "rank": hvd.rank(), "own": own, "pid": os.getpid()}
