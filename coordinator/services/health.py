"""gRPC's health service (grpc.health.v1.Health, github.com/grpc/grpc/blob/master/doc/health-checking.md), for probes.

Its two messages have one field each: HealthCheckRequest a string, HealthCheckResponse an enum. StringValue and
Int32Value of protobuf's own types are the same on the wire, so no contract has to be generated. The package that has
one, grpcio-health-checking, moves in step with grpcio and protobuf, for two messages of one field.

Reached without a token (auth.py): a probe has none, and learns whether this coordinator serves, nothing else. So the
request is read as a stream, for REQUEST_S at most, and few of them at a time: gRPC would wait for a whole request of
8 MiB for as long as a stranger likes. Who comes when all seats are taken gets one of the silent (base/seats.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from horovod.base.errors import ClusterCode, coded
from horovod.base.seats import Seats, peer_of_grpc
from horovod.base.tasks import end_tasks

from .strangers import Strangers
from .streams import Context

PREFIX = "/grpc.health.v1.Health/"
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
SERVICES = ("", "horovod.v1.Membership", "horovod.v1.Negotiation")
LOOK_S = 1.0  # how often a watch looks at the state, in seconds
REQUEST_S = 1.0
MAX_REQUEST_BYTES = 1 << 10
MAX_READ, MAX_READ_OF_PEER = 4, 2  # requests that are read at a time: in all, and of one peer. Each has 8 MiB at most
MAX_WATCHES, MAX_WATCHES_OF_PEER = 64, 16

_Seat = asyncio.Event  # set when another request has taken the seat


def add_health_to_server(obstacle: Callable[[], Awaitable[str]], server: grpc.aio.Server, strangers: Strangers) -> None:
    """obstacle: the sentence why this coordinator can't serve, or ""."""
    read: Seats[_Seat] = Seats(MAX_READ, MAX_READ_OF_PEER)
    watches: Seats[_Seat] = Seats(MAX_WATCHES, MAX_WATCHES_OF_PEER)

    async def state() -> Int32Value:
        return Int32Value(value=NOT_SERVING if await obstacle() else SERVING)

    def take(seats: Seats[_Seat], context: Context) -> _Seat:
        seat = asyncio.Event()
        if (going := seats.take(peer_of_grpc(context.peer()), seat)) is not None:
            going.set()
        return seat

    async def service(requests: AsyncIterator[bytes], context: Context) -> str:
        """Of which the state is asked for. Ends the call where that is not said soon."""
        seat = take(read, context)
        reading, lost = asyncio.ensure_future(anext(requests, b"")), asyncio.ensure_future(seat.wait())
        try:
            await asyncio.wait({reading, lost}, timeout=REQUEST_S, return_when=asyncio.FIRST_COMPLETED)
            data = reading.result() if reading.done() else None
        finally:
            read.leave(seat)
            await end_tasks([reading, lost])
        if data is None:
            sentence = coded(ClusterCode.WRONG_MESSAGE, "The request for this coordinator's health did not come whole.")
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, sentence)
        if (name := _service_of(data)) is None:
            sentence = coded(ClusterCode.WRONG_MESSAGE, "The request is damaged or of another protocol.")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence)
        return name

    async def check(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Int32Value]:
        if await service(requests, context) not in SERVICES:
            sentence = coded(ClusterCode.WRONG_MESSAGE, "This coordinator has no such service.")
            await context.abort(grpc.StatusCode.NOT_FOUND, sentence)
        yield await state()

    async def watch(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Int32Value]:
        is_known = await service(requests, context) in SERVICES
        last: Int32Value | None = None
        seat = take(watches, context)
        try:
            with strangers.watching(context.peer()):
                while not context.done() and not seat.is_set():
                    now = await state() if is_known else Int32Value(value=SERVICE_UNKNOWN)
                    if now != last:
                        yield now
                    last = now
                    await asyncio.sleep(LOOK_S)
        finally:
            watches.leave(seat)
        sentence = coded(ClusterCode.TOO_MANY_MESSAGES, "Too many watch this coordinator's health; watch again later.")
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)

    handlers: dict[str, Any] = {
        name: grpc.stream_stream_rpc_method_handler(method, response_serializer=Int32Value.SerializeToString)
        for name, method in (("Check", check), ("Watch", watch))
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PREFIX.strip("/"), handlers),))


def _service_of(request: bytes) -> str | None:
    """None: these bytes are no request."""
    try:
        return str(StringValue.FromString(request).value) if len(request) <= MAX_REQUEST_BYTES else None
    except DecodeError:
        return None
