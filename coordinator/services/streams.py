"""Both directions of one bidirectional stream, from its first message to its end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from .outbox import Outbox

FIRST_MESSAGE_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)
Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class RefusedError(Exception):
    """Ends the stream with a status and a sentence."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


async def first_message(requests: AsyncIterator[Request], context: Context, what: str) -> Request:
    """The message with which a stream begins. A peer that connects and says nothing is sent away after a while."""
    try:
        return await asyncio.wait_for(requests.__anext__(), FIRST_MESSAGE_TIMEOUT_S)
    except StopAsyncIteration:
        sentence = f"The stream ended before its first message, which must be {what}."
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence)
    except asyncio.TimeoutError:
        sentence = f"No message came in {FIRST_MESSAGE_TIMEOUT_S:.0f} s; the first one must be {what}."
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, sentence)
    except DecodeError:
        sentence = f"The first message is damaged or of another protocol; it must be {what}."
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence)


async def converse(
    requests: AsyncIterator[Request],
    context: Context,
    outbox: Outbox[Response],
    receive: Callable[[Request], None],
    combine: Callable[[list[Response]], Iterable[Response]],
) -> None:
    """Feeds every request to `receive` and sends what comes into `outbox`, until that ends or the peer sends no more.

    combine: makes of all items that wait the messages to send.
    """

    async def read() -> None:
        try:
            async for request in requests:
                receive(request)
            outbox.close()
        except RefusedError as error:
            outbox.fail(error.code, str(error))
        except Exception:
            # Whatever a peer sends may end its own stream only. (gRPC's own errors of a broken stream come here,
            # too.)
            _log.debug("The stream of %s could not be read.", context.peer(), exc_info=True)
            outbox.fail(grpc.StatusCode.INVALID_ARGUMENT, "The coordinator could not make sense of a message.")

    async def write() -> None:
        try:
            while items := await outbox.take():
                for message in combine(items):
                    await context.write(message)
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
