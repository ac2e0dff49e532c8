"""One task of Spark: starts its process, passes on what that prints, and reports its end.

The process is not the Python worker of the task, which Spark uses for other tasks again: a process of its own has the
interpreter, the variables and the output that the user asks for, begins without the threads of another library, and its
exit code says how it ended (docs/adr/0087). The worker waits for it. Whatever ends the worker (Spark kills it some
seconds after a job was cancelled) ends the process too: the guardian of the agent sees to that.

The order of the driver comes with the task and holds the token of its coordinator; who may read what Spark sends may
read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from horovod.base.errors import LaunchCode, WorldCode, coded, without_code
from horovod.base.settings import ROWS, variables
from horovod.base.words import printable
from horovod.launch import task as function
from horovod.launch.job_environment import of_another, trusting
from horovod.runner.common.util.host_hash import host_hash, host_name
from horovod.spark.task import messages
from horovod.spark.task.messages import Came, Ended, Ordered, Refused, Release, Start
from horovod.worker.agent.guardian import Guardian
from horovod.worker.agent.orders import obey
from horovod.worker.agent.output import QUEUE_LIMIT_BYTES, Stream
from horovod.worker.agent.supervisor import Outcome, Slot, Supervisor
from horovod.worker.runtime.channel import explain, open_aio_channel
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.tls import ClientTls
from horovod.worker.runtime.token import Credential

_CONNECT_S = 60.0  # a driver is there before its tasks: only a firewall or a wrong address can be in the way
_MESSAGE_BYTES = 1 << 18  # of output in one message, before the last piece
_LETTERS: dict[Stream, bytes] = {"stdout": messages.STDOUT, "stderr": messages.STDERR}


@dataclass(frozen=True)
class Order:
    """Where a task finds its driver. certificate: by which its coordinator is known, in PEM; "": without TLS."""

    address: str
    token: str = field(repr=False)
    certificate: str
    server_name: str | None
    keepalive_timeout_s: float


def attended(order: Order, partitions: Iterable[Any]) -> Iterator[int]:
    """The function of each task; `partitions` are numbers, of which it gets one. RuntimeError: Spark is to know a
    failure.
    """
    for partition in partitions:
        attend(order, partition)
        yield partition


def attend(order: Order, partition: int) -> None:
    """RuntimeError with a sentence when the process failed, or none was started."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    gpu = context.resources().get("gpu")
    gpus = list(gpu.addresses) if gpu is not None else []
    came = Came(partition, context.attemptNumber(), host_name(), host_hash(), gpus)
    descriptors: tuple[int, ...] = ()
    try:
        trust, descriptors = trusting(order.certificate, order.server_name)
        failure = asyncio.run(_Task(order, came, trust, descriptors).run())
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    if failure:
        raise RuntimeError(failure)


class _Task:
    """Both directions of the stream, and the process between them."""

    def __init__(self, order: Order, came: Came, trust: dict[str, str], descriptors: tuple[int, ...]) -> None:
        self._order = order
        self._came = came
        self._trust = trust
        self._descriptors = descriptors
        self._sink = Output()
        self._supervisor: Supervisor | None = None
        self._running: asyncio.Task[None] | None = None
        self._failure = ""
        self._has_ended = False
        self._fails_task = False
        self._opened = contextlib.ExitStack()

    async def run(self) -> str:
        """Returns why the task failed, or ""."""
        order = self._order
        tls = ClientTls(self._trust[ROWS["tls_ca"].env], server_name=order.server_name) if order.certificate else None
        with self._opened:
            return await self._attend(order, tls)

    async def _attend(self, order: Order, tls: ClientTls | None) -> str:
        async with open_aio_channel(order.address, tls, order.keepalive_timeout_s) as channel:
            try:
                await asyncio.wait_for(channel.channel_ready(), _CONNECT_S)
            except asyncio.TimeoutError:
                return unreachable(order.address, self._came.host)
            try:
                shown = Credential(order.address, order.token, tls is not None).metadata()
            except StartError as error:  # another user's process, whose orders are not obeyed
                return str(error)
            attend: Any = channel.stream_stream(messages.METHOD)
            call = attend(metadata=shown, wait_for_ready=True)
            self._sink.put(messages.written(self._came))
            sending = asyncio.create_task(self._send(call))
            try:
                told = await self._obey(call)
            except grpc.aio.AioRpcError as error:
                # The driver has ended, or is out of reach: nobody waits for this rank any more.
                told = explain(error.code(), printable(error.details() or ""), order.address, True)
            finally:
                await self._stop()
                sending.cancel()
                with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                    await sending
        if self._has_ended:
            return self._failure if self._fails_task else ""
        return told

    async def _send(self, call: Any) -> None:
        try:
            async for content in self._sink:
                await call.write(content)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the other direction has the reason
            self._sink.abandon()

    async def _obey(self, call: Any) -> str:
        """Until the driver releases the task; returns why it refuses it, or ""."""
        async for content in call:
            message = messages.read(content)
            if isinstance(message, Start) and self._running is None:
                self._start(message)
            elif isinstance(message, Ordered) and self._supervisor is not None:
                obey(message.order, self._supervisor)
            elif isinstance(message, Release):
                return ""
            elif isinstance(message, Refused):
                return message.sentence
        return "" if self._has_ended else coded(LaunchCode.RANK_FAILED, "The driver has ended this task.")

    def _start(self, start: Start) -> None:
        self._fails_task = start.fails_task
        command = [start.python or sys.executable, "-c", function.PROGRAM, function.BY_COORDINATOR]
        environ = environment(os.environ, start, self._came.gpus, spark_folders(sys.path)) | self._trust
        slot = Slot(int(start.environ[ROWS["rank"].env]), command, environ, descriptors=self._descriptors)
        try:
            guardian = self._opened.enter_context(Guardian())
        except OSError as error:
            self._not_started(error)
            return
        supervisor = self._supervisor = Supervisor(self._sink, guardian)
        supervisor.changed = lambda: self._tell_end(supervisor.outcomes)
        self._running = asyncio.create_task(self._run(supervisor, slot))

    async def _run(self, supervisor: Supervisor, slot: Slot) -> None:
        """The process, from its beginning to its last output."""
        try:
            await supervisor.run([slot])
        except Exception as error:  # whatever it is, the driver must hear of it: nobody else waits for this process
            self._not_started(error)
        else:
            self._sink.close()

    def _not_started(self, error: Exception) -> None:
        if not self._has_ended:
            if isinstance(error, OSError):
                sentence = without_code(error.strerror or str(error))
            else:
                sentence = f"its process can't be started or watched: {type(error).__name__}: {error}"
            self._failure, self._has_ended = sentence, True
            self._sink.put(messages.written(Ended(0, None, False, sentence)))
        self._sink.close()

    def _tell_end(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            if not self._has_ended:
                self._has_ended = True
                if outcome.code != 0:
                    self._failure = coded(
                        LaunchCode.RANK_FAILED, f"The process of this task ended with {_in_words(outcome.code)}."
                    )
                self._sink.put(messages.written(Ended(outcome.pid, outcome.code, outcome.stopped)))

    async def _stop(self) -> None:
        if self._running is None:
            return
        if self._supervisor is not None and not self._has_ended:
            self._supervisor.stop()
        await self._running


class Output:
    """The sink of the process, and the queue of all that goes to the driver. Used in the event loop alone."""

    def __init__(self) -> None:
        self.room: Callable[[], None] = lambda: None
        self._queue: deque[bytes] = deque()
        self._held = 0
        self._is_closed = False
        self._is_abandoned = False
        self._changed = asyncio.Event()

    def feed(self, rank: int, stream: Stream, data: bytes) -> bool:
        if self._is_abandoned:
            return True
        self.put(_LETTERS[stream] + data)
        return self._held <= QUEUE_LIMIT_BYTES

    def finish(self, rank: int, stream: Stream) -> None:
        pass

    def put(self, content: bytes) -> None:
        self._queue.append(content)
        self._held += len(content)
        self._changed.set()

    def close(self) -> None:
        """Nothing comes any more."""
        self._is_closed = True
        self._changed.set()

    def abandon(self) -> None:
        """Nobody takes it any more: the process is not to wait in its prints."""
        self._is_abandoned = True
        self._queue.clear()
        self._held = 0
        self.room()

    async def __aiter__(self) -> Any:
        while True:
            while self._queue:
                content, held = self._taken()
                yield content
                was_full = self._held > QUEUE_LIMIT_BYTES // 2
                self._held -= held
                if was_full and self._held <= QUEUE_LIMIT_BYTES // 2:
                    self.room()
            if self._is_closed:
                return
            self._changed.clear()
            if not self._queue:
                await self._changed.wait()

    def _taken(self) -> tuple[bytes, int]:
        """The next message, and how many bytes of the queue it was. Output of one stream that waits goes as one
        message: most of the time of a message does not depend on its length.
        """
        content = self._queue.popleft()
        held = len(content)
        if not messages.is_output(content):
            return content, held
        joined = [content]
        while self._queue and self._queue[0][:1] == content[:1] and held < _MESSAGE_BYTES:
            following = self._queue.popleft()
            held += len(following)
            joined.append(following[1:])
        return b"".join(joined), held


def unreachable(address: str, host: str) -> str:
    """Spark passes it on to the driver."""
    sentence = (
        f"The driver's coordinator at {address} can't be reached from host {host}. Executors must be able to "
        "connect to all ports of the driver's host. If they reach it under another address, set "
        "spark.driver.host or nics."
    )
    return coded(WorldCode.COORDINATOR_UNREACHABLE, sentence)


def environment(own: Mapping[str, str], start: Start, gpus: list[str], folders: list[str]) -> dict[str, str]:
    """The variables of the process. own: those of the task. folders: where Spark puts the modules of the job."""
    other = set(of_another(own))
    environ = {name: value for name, value in own.items() if name not in other} | start.environ
    for name in start.unset:
        environ.pop(name, None)
    # Where modules are, and the tokens of the container, is known here and not to the driver.
    places = [*start.environ.get("PYTHONPATH", "").split(os.pathsep), *own.get("PYTHONPATH", "").split(os.pathsep)]
    if kept := [place for place in dict.fromkeys([*places, *folders]) if place]:
        environ["PYTHONPATH"] = os.pathsep.join(kept)
    if (tokens := own.get("HADOOP_TOKEN_FILE_LOCATION")) is not None:
        environ["HADOOP_TOKEN_FILE_LOCATION"] = tokens
    if gpus:
        environ |= variables(spark_gpus=tuple(gpus))
    return environ


def spark_folders(path: Iterable[str]) -> list[str]:
    """The entries of the worker's import path that come with the job: --py-files, addPyFile."""
    from pyspark import SparkFiles

    root = os.path.realpath(SparkFiles.getRootDirectory())
    return [entry for entry in path if entry and os.path.realpath(entry).startswith(root)]


def _in_words(code: int | None) -> str:
    return "no exit code" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
