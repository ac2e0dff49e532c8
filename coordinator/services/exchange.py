"""The way of a function of `horovod.run` to ranks on other hosts, and of their results back.

It leads over the coordinator that the caller has started for them: no other port is opened, and the same token is asked
for.

Bytes in pieces; what they mean is the business of both ends (clients/horovod/launch/task.py), which are one program.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc

from .auth import Access
from .streams import Context

_SERVICE = "horovod.v1.Exchange"
FETCH, DELIVER = f"/{_SERVICE}/Fetch", f"/{_SERVICE}/Deliver"
JOB, RANK = "horovod-job", "horovod-rank"  # keys in the metadata of a call
PIECE_BYTES = 1 << 20


class Service(Protocol):
    """What a launcher serves beside its coordinator."""

    def handler(self, access: Access) -> grpc.GenericRpcHandler:
        """The handler to add to a gRPC server."""


class Exchange:
    """What all ranks fetch, and what each delivers once. `results` is in the order of arrival."""

    def __init__(self, content: bytes, replaced: bool = False) -> None:
        """replaced: processes may replace each other, of which the last one to deliver counts."""
        self.results: dict[int, bytes] = {}
        self._replaced = replaced
        self._content = memoryview(content)

    def handler(self, access: Access) -> grpc.GenericRpcHandler:
        """The handler to add to a gRPC server."""

        async def fetch(_request: bytes, context: Context) -> AsyncIterator[bytes]:
            await access.admit(context, _metadata(context)[JOB])
            for at in range(0, len(self._content), PIECE_BYTES):
                yield bytes(self._content[at : at + PIECE_BYTES])

        async def deliver(pieces: AsyncIterator[bytes], context: Context) -> bytes:
            told = _metadata(context)
            await access.admit(context, told[JOB])
            content = b"".join([piece async for piece in pieces])
            if self._replaced:
                self.results.pop(int(told[RANK]), None)
            self.results.setdefault(int(told[RANK]), content)
            return b""

        handlers: dict[str, Any] = {
            "Fetch": grpc.unary_stream_rpc_method_handler(fetch),
            "Deliver": grpc.stream_unary_rpc_method_handler(deliver),
        }
        return grpc.method_handlers_generic_handler(_SERVICE, handlers)


def _metadata(context: Context) -> dict[str, str]:
    return {str(name): str(value) for name, value in context.invocation_metadata() or ()}
