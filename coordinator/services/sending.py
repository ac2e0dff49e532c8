"""How one message goes to many members: serialized once, and a large one to some of them at a time.

A world of n members goes to n members. Serialized for each, and all at once, forming a world of 4,096 took seconds of
processor time and two gigabytes of buffers for one message of 370 KB.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError, Message

from horovod.base.errors import ClusterCode, coded

from .repeats import Repeats

KEPT = 8
KEPT_FROM_BYTES = 1 << 10
LARGE_BYTES = 64 << 10
LARGE_AT_ONCE_BYTES = 64 << 20  # bytes of large messages that peers have not taken yet
PATIENCE_S = 1.0  # seconds after which a peer that does not read keeps others waiting no longer


def as_bytes(message: Message | bytes) -> bytes:
    """gRPC's serializer for streams some of whose messages are bytes already."""
    return message if isinstance(message, bytes) else message.SerializeToString()


class Serializer:
    """The bytes of a message. Equal answers for many members are one object, which must not be changed any more."""

    def __init__(self) -> None:
        # Id() of a message -> the message, which keeps that id() taken, and its bytes.
        self._recent: OrderedDict[int, tuple[Message, bytes]] = OrderedDict()

    def __call__(self, message: Message) -> bytes:
        found = self._recent.get(id(message))
        if found is not None:
            return found[1]
        data = message.SerializeToString()
        if len(data) >= KEPT_FROM_BYTES:
            self._recent[id(message)] = (message, data)
            if len(self._recent) > KEPT:
                self._recent.popitem(last=False)
        return data


class Turns:
    """Bounds the bytes of large messages under way; of small ones it is the peers' outboxes that do."""

    def __init__(self, most_bytes: int = LARGE_AT_ONCE_BYTES, patience_s: float = PATIENCE_S) -> None:
        self._most_bytes = most_bytes
        self._patience_s = patience_s
        self._bytes = 0
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """A turn to write a message of `size` bytes; held while it is being written."""
        if size < LARGE_BYTES:
            yield
            return
        while self._bytes and self._bytes + size > self._most_bytes:
            self._freed.clear()
            await self._freed.wait()
        self._bytes += size
        held = True

        def free() -> None:
            nonlocal held
            if held:
                held = False
                self._bytes -= size
                self._freed.set()

        patience = asyncio.get_running_loop().call_later(self._patience_s, free)
        try:
            yield
        finally:
            patience.cancel()
            free()


class Sending:
    """The serializer and the turns that all streams of a coordinator share."""

    def __init__(self) -> None:
        self.serializer = Serializer()
        self.turns = Turns()
        self.repeats = Repeats()


def add_service_to_server(server: grpc.aio.Server, file: FileDescriptor, name: str, servicer: Any) -> None:
    """Serves each method of the service `name` of a .proto file by the method of `servicer` that has the same name, as
    the generated add_..._to_server does; but answers may be bytes already, and requests are parsed as below.
    """
    (contract,) = (one for one in FileDescriptorProto.FromString(file.serialized_pb).service if one.name == name)
    described: Any = file.services_by_name[name]  # protobuf before 4.22 has no public name for a descriptor's class
    handlers: dict[str, Any] = {}
    for method in contract.method:
        serve = getattr(servicer, method.name)
        request = described.methods_by_name[method.name].input_type._concrete_class
        if method.client_streaming and method.server_streaming:
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(serve, request.FromString, as_bytes)
        else:
            assert method.client_streaming is method.server_streaming is False, "a stream on one side only"
            handlers[method.name] = call_handler(serve, request)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"{file.package}.{name}", handlers),))


def call_handler(servicer: Any, request: type[Message]) -> grpc.RpcMethodHandler[Any, Any]:
    """For a method with one request and one answer.

    The bytes are parsed here: gRPC would tell the caller nothing of bytes that are no message, and write a traceback to
    the log, for a peer that has not shown its token yet.
    """

    async def call(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            message = request.FromString(data)
        except DecodeError:
            sentence = coded(ClusterCode.WRONG_MESSAGE, "The request is damaged or of another protocol.")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence)
        return await servicer(message, context)

    return grpc.unary_unary_rpc_method_handler(call, response_serializer=as_bytes)
