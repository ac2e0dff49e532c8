"""The methods of services, and what all that have one request and one answer have in common.

Such a method makes the answer of the request, or raises RefusedError, StoreError or NotServingError. Around it:

    the bytes are parsed       those that are no message end the call with a sentence
    the caller is admitted     as to all jobs: a method that a job's token admits to is a stream, and admits by itself
    this coordinator serves    or the caller is sent to the one that does, for the services that one coordinator has
    what it raises             becomes a status and a sentence; an unexpected error is logged as the coordinator's own
"""

from __future__ import annotations

import logging
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError, Message

from horovod.base.errors import ClusterCode, coded
from horovod.base.protocol import PROTOCOL, PROTOCOL_VERSION, RELEASE, __version__
from horovod.base.words import printable, release_in_words
from horovod.coordinator.store import StoreError, TooLargeError, WritesRefusedError

from .auth import Access
from .cluster import ClusterHub, check_serving, send_on
from .sending import as_bytes
from .streams import Context, NotServingError, own_errors

_log = logging.getLogger(__name__)

ANYWHERE = frozenset({"Connected"})  # what each coordinator answers for itself, of the services that only one has


def add_service_to_server(
    server: grpc.aio.Server,
    file: FileDescriptor,
    name: str,
    servicer: Any,
    access: Access,
    hub: ClusterHub | None = None,
) -> None:
    """Serves each method of the service `name` of a .proto file by the method of `servicer` that has the same name.

    hub: only the coordinator that serves agents and jobs has this service. Its streams check that by themselves.
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
            handlers[method.name] = _of_one_answer(serve, request, access, None if method.name in ANYWHERE else hub)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"{file.package}.{name}", handlers),))


async def check_release(context: Context) -> None:
    """Ends a call of a launcher with another protocol number. A launcher that sends no number is served."""
    given = dict(context.invocation_metadata() or ())
    spoken = str(given.get(PROTOCOL, PROTOCOL_VERSION))
    if spoken != str(PROTOCOL_VERSION):
        sentence = (
            f"The launcher has {release_in_words(str(given.get(RELEASE, '')))} (protocol {printable(spoken, 20)}), but "
            f"the coordinator has Horovod {__version__} (protocol {PROTOCOL_VERSION}), and these do not understand "
            "each other. Install releases with the same first number on both."
        )
        refusal = coded(ClusterCode.LAUNCHER_VERSION, sentence)
        _log.info("Refused: %s", refusal)
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)


def _of_one_answer(
    serve: Any, request: type[Message], access: Access, hub: ClusterHub | None
) -> grpc.RpcMethodHandler[Any, Any]:
    """The bytes are parsed here: gRPC would tell the caller nothing of bytes that are no message, and write a traceback
    to the log, for a peer that has not shown its token yet.
    """

    async def call(data: bytes, context: Context) -> Any:
        try:
            message = request.FromString(data)
        except DecodeError:
            sentence = coded(ClusterCode.WRONG_MESSAGE, "The request is damaged or of another protocol.")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence)
        await access.admit(context, None, len(data))
        await check_release(context)
        if hub is not None:
            await check_serving(hub, context)
        try:
            async with own_errors(context, f"a caller of {request.DESCRIPTOR.name}"):
                return await serve(message)
        except StoreError as error:
            # By the status the client knows whether it helps to ask again.
            is_final = isinstance(error, TooLargeError | WritesRefusedError)
            status = grpc.StatusCode.FAILED_PRECONDITION if is_final else grpc.StatusCode.UNAVAILABLE
            await context.abort(status, f"This request needs the store, which fails: {error}")
        except NotServingError:  # it has ceased to serve meanwhile
            assert hub is not None
            await send_on(hub, context)

    return grpc.unary_unary_rpc_method_handler(call, response_serializer=as_bytes)
