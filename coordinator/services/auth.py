"""Bearer tokens: without the right one no method is reached."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from .health import PREFIX as HEALTH

_SENTENCE = (
    "The coordinator asks for a token, but {what}. Set HOROVOD_TOKEN to the token that it was started with, or "
    "HOROVOD_TOKEN_FILE to its file. Started without --token-file, it serves the processes of its own user only, which "
    "find the token by themselves."
)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Ends every call that does not carry `authorization: Bearer <token>` with UNAUTHENTICATED."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(HEALTH):
            return handler
        metadata: Any = handler_call_details.invocation_metadata  # the stubs know less than gRPC about this one
        given: str | bytes | None = dict(metadata).get("authorization")
        if given is None:
            return _refusing(handler, _SENTENCE.format(what="the call carried none"))
        as_bytes = given if isinstance(given, bytes) else given.encode()
        if not hmac.compare_digest(as_bytes, self._expected):
            return _refusing(handler, _SENTENCE.format(what="the call carried another one"))
        return handler


def _refusing(handler: grpc.RpcMethodHandler[Any, Any], sentence: str) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same kind (streaming or not on either side) that says why nothing happens."""

    async def refuse(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, sentence)

    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    refusing: grpc.RpcMethodHandler[Any, Any] = make(
        refuse,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return refusing
