"""gRPC's health service (grpc.health.v1.Health, github.com/grpc/grpc/blob/master/doc/health-checking.md), for probes.

Its two messages have one field each: HealthCheckRequest a string, HealthCheckResponse an enum. StringValue and
Int32Value of protobuf's own types are the same on the wire, so no contract has to be generated. The package that has
one, grpcio-health-checking, moves in step with grpcio and protobuf, for two messages of one field.

Reached without a token (auth.py): a probe has none, and learns whether this coordinator serves, nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from horovod.base.errors import ClusterCode, coded

from .streams import Context

PREFIX = "/grpc.health.v1.Health/"
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
SERVICES = ("", "horovod.v1.Membership", "horovod.v1.Negotiation")
LOOK_S = 1.0  # how often a watch looks


def add_health_to_server(obstacle: Callable[[], Awaitable[str]], server: grpc.aio.Server) -> None:
    """obstacle: the sentence why this coordinator can't serve, or ""."""

    async def state() -> Int32Value:
        return Int32Value(value=NOT_SERVING if await obstacle() else SERVING)

    async def check(request: StringValue, context: Context) -> Int32Value:
        if request.value not in SERVICES:
            sentence = coded(ClusterCode.WRONG_MESSAGE, "This coordinator has no such service.")
            await context.abort(grpc.StatusCode.NOT_FOUND, sentence)
        return await state()

    async def watch(request: StringValue, context: Context) -> AsyncIterator[Int32Value]:
        last: Int32Value | None = None
        while not context.done():
            now = await state() if request.value in SERVICES else Int32Value(value=SERVICE_UNKNOWN)
            if now != last:
                yield now
            last = now
            await asyncio.sleep(LOOK_S)

    make: Any = {
        "request_deserializer": StringValue.FromString,
        "response_serializer": Int32Value.SerializeToString,
    }
    handlers: dict[str, Any] = {
        "Check": grpc.unary_unary_rpc_method_handler(check, **make),
        "Watch": grpc.unary_stream_rpc_method_handler(watch, **make),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PREFIX.strip("/"), handlers),))
