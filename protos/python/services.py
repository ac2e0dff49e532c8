"""What a client and a server need of a gRPC service, of its methods' names and messages (docs/adr/0069).

What grpcio-tools generates refuses any grpcio that is older than itself. The three things made here bear the names and
have the behaviour of the generated ones, and ask of grpcio what it has always had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import grpc

# How many messages go to the server and come back.
Arity = Literal["unary_unary", "unary_stream", "stream_unary", "stream_stream"]
Method = tuple[Arity, Any, Any]  # with the classes of requests and responses


def stub(service: str, methods: Mapping[str, Method]) -> type:
    """A class: of a channel it makes what calls each method of `service` ("horovod.v1.Jobs"), for asyncio or not."""

    def __init__(self: Any, channel: Any) -> None:  # noqa: N807 - it becomes the method of a class
        for name, (arity, request, response) in methods.items():
            call = getattr(channel, arity)(
                f"/{service}/{name}",
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )
            setattr(self, name, call)

    return type(f"{_short(service)}Stub", (), {"__init__": __init__})


def servicer(service: str, methods: Mapping[str, Method]) -> type:
    """The base class of what serves: each method answers that it is not implemented."""

    def unimplemented(name: str) -> Callable[..., Any]:
        def method(self: Any, request: Any, context: grpc.ServicerContext) -> Any:
            context.set_code(grpc.StatusCode.UNIMPLEMENTED)
            context.set_details(f"{service} has no {name} here.")
            raise NotImplementedError(f"{service} has no {name} here.")

        method.__name__ = name
        return method

    return type(f"{_short(service)}Servicer", (), {name: unimplemented(name) for name in methods})


def adder(service: str, methods: Mapping[str, Method]) -> Callable[[Any, Any], None]:
    """A function: lets a server answer calls of `service` by the methods of a servicer."""

    def add_to_server(servicer: Any, server: Any) -> None:
        handlers = {
            name: getattr(grpc, f"{arity}_rpc_method_handler")(
                getattr(servicer, name),
                request_deserializer=request.FromString,
                response_serializer=response.SerializeToString,
            )
            for name, (arity, request, response) in methods.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    return add_to_server


def _short(service: str) -> str:
    return service.rpartition(".")[2]
