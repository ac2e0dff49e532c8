"""Worlds whose ranks are threads of this process, and ranks that are processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from resources import eventually

from horovod._core import DType, OpSpec, OpType
from horovod.base.settings import resolve
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.worker.runtime.epoch import begin, end
from horovod.worker.runtime.formation import Context

DEADLINE_SECONDS = 60.0


def form_threads(address: str, threads: int, **explicit: Any) -> list[Context]:
    """A world of threads, in rank order. Shared memory works between them as it does between processes."""
    settings = resolve({}, {"coordinator": address, "size": threads, **explicit})
    with ThreadPoolExecutor(threads) as pool:
        contexts = [future.result() for future in [pool.submit(begin, settings) for _ in range(threads)]]
    return sorted(contexts, key=lambda context: context.world.rank)


def close_all(contexts: Sequence[Context]) -> None:
    with ThreadPoolExecutor(max(1, len(contexts))) as pool:
        list(pool.map(end, contexts))


@contextlib.contextmanager
def world(address: str, size: int = 2, **explicit: Any) -> Iterator[list[Context]]:
    contexts = form_threads(address, size, **explicit)
    try:
        yield contexts
    finally:
        close_all(contexts)


def allreduce(context: Context, name: str, value: float = 1.0) -> float:
    """The sum of `value` over all ranks."""
    data = array("f", [value])
    pointer = data.buffer_info()[0]
    handle = context.engine.submit(
        OpSpec(OpType.ALLREDUCE), f"allreduce.{name}", [(pointer, pointer, DType.FLOAT32, (1,))]
    )
    handle.result()
    return data[0]


def allreduce_all(contexts: Sequence[Context], name: str) -> list[float]:
    with ThreadPoolExecutor(len(contexts)) as pool:
        return list(pool.map(lambda context: allreduce(context, name), contexts))


def await_first(coordinator: EmbeddedCoordinator, job: str = "default") -> bool:
    """Whether some process waits in the job, the only one there, for its world; when not, after a minute."""
    server = coordinator.server
    assert server is not None
    return eventually(lambda: [one.name for one in server.overview()] == [job], DEADLINE_SECONDS)


_of_earlier_tests: set[threading.Thread] = set()


def leave_out_threads_of_earlier_tests() -> None:
    """At the beginning of a test. Tests of other folders leave their streams to the garbage collector."""
    _of_earlier_tests.clear()
    _of_earlier_tests.update(threading.enumerate())


def threads_of_streams() -> list[str]:
    """Threads of gRPC that serve a client's stream. One that is alive when the interpreter ends may hang it."""
    own = set(threading.enumerate()) - _of_earlier_tests
    return [thread.name for thread in own if thread.name.endswith("(_run)")]  # gRPC's name for both


PRELUDE = """
import os, signal, sys, threading, time
from array import array
from horovod._core import OpSpec
from horovod.common import basics as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.worker.runtime.context import current

def allreduce(name, value=1.0):
    data = array("f", [value])
    pointer = data.buffer_info()[0]
    engine = current().engine
    engine.submit(OpSpec(0), "allreduce." + name, [(pointer, pointer, 7, (1,))]).result()
    return data[0]
"""


class Program:
    """A Python process that runs `script` after PRELUDE.

    prefix: of the command, for a namespace.
    """

    def __init__(self, script: str, prefix: Sequence[str] = (), **environment: str) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", PRELUDE + script],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # communicate() would not see what readline() has read into a buffer
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def tell(self, text: str = "") -> None:
        """Lets it go on that waits for a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())

    def finish(self, seconds: float = DEADLINE_SECONDS) -> str:
        """What else it printed; it must end well, and in time."""
        code, out, err = self.end(seconds)
        assert code == 0, err
        return out.strip()

    def end(self, seconds: float = DEADLINE_SECONDS) -> tuple[int, str, str]:
        """How it ended, in time, and what else it printed."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out.decode(), err.decode()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
