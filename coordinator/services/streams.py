"""Both directions of one bidirectional stream, from its first message to its end."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from horovod.base.errors import ClusterCode, EngineCode, coded
from horovod.coordinator.core.rates import RateLimits
from horovod.coordinator.store import StoreError

from .sending import Outbox, RelayedStream, Sending

FIRST_MESSAGE_TIMEOUT_S = 30.0
_SLICE_S = 1.0
DRAIN_TIMEOUT_S = 5.0
MAX_SHOWN = 200  # characters of a peer's name that are shown

_log = logging.getLogger(__name__)
Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class NotServingError(Exception):
    """Another coordinator serves agents and jobs from now on, and is to be asked."""


class RefusedError(Exception):
    """Ends a stream or a call with a status and a sentence."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


async def first_message(requests: AsyncIterator[Request], context: Context, what: str) -> Request:
    """The message with which a stream begins. A peer that connects and says nothing is sent away after a while."""
    try:
        return await _within(requests, FIRST_MESSAGE_TIMEOUT_S)
    except StopAsyncIteration:
        sentence = f"The stream ended before its first message, which must be {what}."
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, coded(ClusterCode.WRONG_MESSAGE, sentence))
    except asyncio.TimeoutError:
        sentence = f"No message came in {FIRST_MESSAGE_TIMEOUT_S:.0f} s; the first one must be {what}."
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, coded(ClusterCode.WRONG_MESSAGE, sentence))
    except DecodeError:
        sentence = f"The first message is damaged or of another protocol; it must be {what}."
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, coded(ClusterCode.WRONG_MESSAGE, sentence))


async def _within(requests: AsyncIterator[Request], limit_s: float) -> Request:
    """The next message. TimeoutError when none comes in a time in which this coordinator could have read it.

    4,096 members that announce 500 tensors at once are half a minute of work. What waits behind that is not late, so a
    slice of the limit counts as one, however long the event loop took for it.
    """

    async def receive() -> Request:
        return await requests.__anext__()

    receiving = asyncio.create_task(receive())
    slice_s = min(_SLICE_S, limit_s)
    try:
        for _ in range(max(1, round(limit_s / slice_s))):
            if (await asyncio.wait({receiving}, timeout=slice_s))[0]:
                return receiving.result()
        raise asyncio.TimeoutError
    finally:
        receiving.cancel()


def own_error(error: Exception, who: str) -> str:
    """The sentence for the peer after an error of the coordinator itself, which is logged with its traceback."""
    _log.error("An error of the coordinator itself ended the stream of %s. Please report it.", who, exc_info=error)
    return coded(
        EngineCode.INTERNAL,
        f"The coordinator failed at a message of {who}: {type(error).__name__}, a bug of the coordinator; its log has "
        "the details. Please report it.",
    )


@contextlib.asynccontextmanager
async def own_errors(context: Context, who: str) -> AsyncIterator[None]:
    """For what a servicer does outside of `converse`: a refusal or an error that is unexpected ends the call."""
    try:
        yield
    except RefusedError as error:
        await context.abort(error.code, str(error))
    except (grpc.aio.AbortError, StoreError, NotServingError):
        raise
    except Exception as error:
        if context.done():
            raise  # the peer is gone, and the rest can't be sent
        await context.abort(grpc.StatusCode.INTERNAL, own_error(error, who))


async def converse(
    requests: AsyncIterator[Request],
    context: Context,
    outbox: Outbox[Response],
    receive: Callable[[Request], Iterable[None] | None],
    combine: Callable[[list[Response]], Iterable[Response]],
    sending: Sending,
    who: str = "a member",
    limits: RateLimits | None = None,
    relayed: RelayedStream | None = None,
    job: str = "",
) -> None:
    """Feeds every request to `receive` and sends what comes into `outbox`, until that ends or the peer sends no more.

    receive: what it returns, if anything, are further steps of the work, between which others are served.
    combine: makes of all items that wait the messages to send.
    who: the peer, as in "rank 1 of job 'digits'".
    limits: how often it may speak, under that name.
    relayed: of a membership stream, whose world may be repeated by a relay.
    job: whose time its messages take; empty: of no job.

    Whatever a peer sends may end its own stream only. When it is the peer's fault (RefusedError, bytes that are no
    message, a connection that broke) the log stays quiet; an unexpected error is the coordinator's own.
    """

    async def read() -> None:
        while True:
            try:
                request = await anext(requests)
            except StopAsyncIteration:
                outbox.close()
                return
            except Exception:
                _log.debug("The stream of %s could not be read.", who, exc_info=True)
                sentence = coded(ClusterCode.WRONG_MESSAGE, "The coordinator could not make sense of a message.")
                outbox.fail(grpc.StatusCode.INVALID_ARGUMENT, sentence)
                return
            if limits and (sentence := limits.message(who, request.ByteSize(), time.monotonic())):
                outbox.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)
                return
            try:
                await take_in(request)
            except RefusedError as error:
                outbox.fail(error.code, str(error))
                return
            except Exception as error:
                outbox.fail(grpc.StatusCode.INTERNAL, own_error(error, who))
                return

    async def take_in(request: Request) -> None:
        """One message, in all its steps. A job that has used up its time waits before each of them."""
        steps: Iterator[None] | None = None
        while steps is None or not outbox.ended.is_set():
            if limits and job and (pause_s := limits.pause_s(job, time.monotonic())):
                await asyncio.sleep(pause_s)
            began_s = time.monotonic()
            try:
                if steps is None:
                    steps = iter(receive(request) or ())
                next(steps)
            except StopIteration:
                return
            finally:
                if limits and job:
                    limits.used(job, time.monotonic() - began_s, began_s)
            await asyncio.sleep(0)

    async def write() -> None:
        try:
            while items := await outbox.take():
                try:
                    messages = list(combine(items))
                except Exception as error:
                    outbox.fail(grpc.StatusCode.INTERNAL, own_error(error, who))
                    return
                for message in messages:
                    data = sending.serializer(message)
                    if relayed is not None and message.WhichOneof("event") == "world":
                        data = await relayed.shortened(data)
                    async with sending.turns.turn(len(data)):
                        await context.write(data)
        finally:
            outbox.close()

    reader, writer = asyncio.create_task(read()), asyncio.create_task(write())
    try:
        await outbox.ended.wait()
        await asyncio.wait({writer}, timeout=DRAIN_TIMEOUT_S)
    finally:
        reader.cancel()
        writer.cancel()
        await asyncio.gather(reader, writer, return_exceptions=True)
    if outbox.failure:
        await context.abort(*outbox.failure)
