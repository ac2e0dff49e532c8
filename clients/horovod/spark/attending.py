"""The driver's end of its tasks: each has one stream, from its beginning to its end (task/messages.py).

What happens here is thin: tasks are remembered, their output goes to the console, and a policy (policies.py) decides,
called in the coordinator's event loop. A stream that breaks before its task has reported the end of its
process is a task that is lost: its executor was killed, or its host.

Spark may run a task twice at a time (speculation), or again while the stream of a lost one still looks alive. The
second waits until the first has ended, and takes its place only if that has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from horovod.coordinator.services.auth import Access
from horovod.coordinator.services.streams import FIRST_MESSAGE_TIMEOUT_S, Context
from horovod.spark.task import messages
from horovod.spark.task.messages import Came, Ended, Message, Refused, Release
from horovod.worker.agent.output import Sink, Stream

_STREAMS: dict[bytes, Stream] = {messages.STDOUT: "stdout", messages.STDERR: "stderr"}
LOST = "its Spark task was lost: the executor has ended, or is out of reach"


@dataclass(eq=False)
class Attempt:
    """One attempt of a task. number: counts those of its partition that were taken, from 1 on."""

    came: Came
    number: int
    shown: int = -1  # the number that its lines of output begin with
    ended: Ended | None = None
    lost: bool = False
    orders: asyncio.Queue[Message] = field(default_factory=asyncio.Queue, repr=False)

    @property
    def has_started(self) -> bool:
        """Whether it was told to start its process."""
        return self.shown >= 0

    @property
    def has_failed(self) -> bool:
        return self.lost or (self.ended is not None and self.ended.code != 0)


class Policy:
    """Decides about tasks, in the coordinator's event loop. `came`: a task waits for its order; `ended`: its process
    has ended, or the task was lost. keeps_failed: a task whose process has failed waits until `Tasks.release_failed`.
    """

    keeps_failed = False

    @property
    def is_done(self) -> bool:
        """The work is done: no process is started any more."""
        return False

    def came(self, attempt: Attempt) -> None: ...

    def ended(self, attempt: Attempt) -> None: ...


class Tasks:
    """A service of the coordinator. `wait` and what begins with `tell` may be called by any thread."""

    def __init__(self, sink: Sink, policy: Policy) -> None:
        self.changed = threading.Condition()  # guards the following
        self.running: dict[int, Attempt] = {}  # by partition, until its stream has ended
        self.most = 0  # how many have run at the same time
        self._sink = sink
        self._policy = policy
        self._counts: dict[int, int] = {}
        self._waiting: dict[int, list[asyncio.Future[bool]]] = {}
        self._refused = ""
        self._is_over = False
        self._is_released = False
        self._failed: list[Attempt] = []  # that wait
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room = asyncio.Event()
        sink.room = self._on_room

    def handler(self, access: Access) -> grpc.GenericRpcHandler:
        make: Any = grpc.stream_stream_rpc_method_handler
        service, method = messages.METHOD[1:].split("/")
        return grpc.method_handlers_generic_handler(service, {method: make(self._attend)})

    # -- for any thread ------------------------------------------------------------------------------------------------

    def wait(self, until: Callable[[], bool], timeout_s: float | None) -> bool:
        """Whether it came to that in time. `until` is asked whenever something has changed."""
        with self.changed:
            return self.changed.wait_for(until, timeout_s)

    def tell_all(self, message: Message) -> None:
        """To all tasks that are there."""

        def tell() -> None:
            for attempt in self.running.values():
                attempt.orders.put_nowait(message)

        self.call(tell)

    def refuse_all(self, sentence: str) -> None:
        """Tasks that come from now on, that wait for their process or for another task, fail with this sentence."""

        def refuse() -> None:
            self._wake_all()
            for attempt in self.running.values():
                if not attempt.has_started:
                    attempt.orders.put_nowait(Refused(sentence))

        self._refused = sentence
        self.call(refuse)

    def release_failed(self) -> None:
        """Tasks whose processes have failed may end."""

        def release() -> None:
            self._is_released = True
            for attempt in self._failed:
                attempt.orders.put_nowait(Release())

        self.call(release)

    def finish(self) -> None:
        """The work is done: tasks that come from now on have nothing to do."""
        self._is_over = True
        self.call(self._wake_all)

    # -- in the coordinator's event loop -------------------------------------------------------------------------------

    async def _attend(self, requests: AsyncIterator[bytes], context: Context) -> None:
        self._loop = asyncio.get_running_loop()
        came = messages.read(await asyncio.wait_for(anext(requests), FIRST_MESSAGE_TIMEOUT_S))
        if not isinstance(came, Came):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a task of this version")
        while came.partition in self.running and not self._refused:
            others = self._waiting.setdefault(came.partition, [])
            others.append(turn := self._loop.create_future())
            if not await turn:  # the first one has done the work
                await context.write(messages.written(Release()))
                return
        if self._refused or self._is_over or self._policy.is_done:
            answer: Message = Refused(self._refused) if self._refused else Release()
            await context.write(messages.written(answer))
            return
        number = self._counts[came.partition] = self._counts.get(came.partition, 0) + 1
        attempt = Attempt(came, number)
        writing = asyncio.create_task(self._write(attempt, context))
        try:
            with self.changed:
                self.running[came.partition] = attempt
                self.most = max(self.most, len(self.running))
                self._policy.came(attempt)
                self.changed.notify_all()
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._read(attempt, requests)
        finally:  # also where gRPC cancels the call, since the task is lost
            self._over(attempt)
            if attempt.ended is None:
                writing.cancel()
            elif self._policy.keeps_failed and attempt.has_failed and not self._is_released:
                self._failed.append(attempt)
            else:
                attempt.orders.put_nowait(Release())
        await writing

    async def _read(self, attempt: Attempt, requests: AsyncIterator[bytes]) -> None:
        async for content in requests:
            if messages.is_output(content):
                self._room.clear()
                if not self._sink.feed(attempt.shown, _STREAMS[content[:1]], content[1:]):
                    await self._room.wait()
            elif isinstance(message := messages.read(content), Ended):
                with self.changed:
                    attempt.ended = message
                    self._policy.ended(attempt)
                    self.changed.notify_all()

    async def _write(self, attempt: Attempt, context: Context) -> None:
        while True:
            message = await attempt.orders.get()
            await context.write(messages.written(message))
            if isinstance(message, Release | Refused):
                return

    def _over(self, attempt: Attempt) -> None:
        for stream in _STREAMS.values():
            self._sink.finish(attempt.shown, stream)
        partition = attempt.came.partition
        with self.changed:
            del self.running[partition]
            if attempt.ended is None:
                attempt.lost = True
                self._policy.ended(attempt)
            self.changed.notify_all()
        for turn in self._waiting.pop(partition, []):
            if not turn.done():
                turn.set_result(attempt.has_failed)

    def _wake_all(self) -> None:
        for turns in self._waiting.values():
            for turn in turns:
                if not turn.done():
                    turn.set_result(not self._is_over)
        self._waiting.clear()

    def _on_room(self) -> None:
        self.call(self._room.set)  # called by the thread that writes

    def call(self, work: Callable[[], Any]) -> None:
        if self._loop is not None:  # else no task has come
            with contextlib.suppress(RuntimeError):  # the coordinator has ended
                self._loop.call_soon_threadsafe(work)
