"""Relays calls of the ranks of this host to coordinators: one connection for each host instead of one for each rank.

The relay is a gRPC server on a unix socket that only this user can reach. It knows no method and parses no message:
bytes, metadata, deadline, the end of either side, status and its details pass through as they come. It passes one
message at a time, so that a slow reader holds back the writer. A call's metadata names its coordinator
(runtime/probe.py). All calls for one coordinator go over one HTTP/2 connection, and a large message for many ranks
goes over it once (Repeated).

Ranks can do without the relay: when their agent has ended, they connect to their coordinator themselves
(docs/adr/0053-relay.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from horovod.base.errors import ClusterCode, coded
from horovod.base.protocol import MAX_WORLD_MESSAGE_BYTES, RELAY, RELAY_FRAME
from horovod.base.setting import split_address
from horovod.protos.v1.relay_pb2 import RelayFrame
from horovod.worker.runtime.channel import open_aio_channel
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.probe import PINGS, TO
from horovod.worker.runtime.tls import ClientTls

# Messages that a relay keeps after it has passed them on: other ranks of its host get the same (relay.proto).

KEPT_S = 180.0  # longer than a coordinator counts on a message being kept
KEPT_BYTES = MAX_WORLD_MESSAGE_BYTES  # of all messages together; the latest one is kept in any case


class Repeated:
    """The latest messages of one coordinator, which it may ask the relay to repeat to other ranks."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, bytes] = OrderedDict()  # key -> message, the latest last

    def passing(self, message: bytes) -> bytes:
        """The message to pass on to the rank: `message`, or the one that the RelayFrame in it names.

        ValueError with a sentence where there is none.
        """
        if not message.startswith(RELAY_FRAME):
            return message
        try:
            frame = RelayFrame.FromString(message[len(RELAY_FRAME) :])
        except DecodeError:
            sentence = "The coordinator has sent what this version's relay can't read."
            raise ValueError(coded(ClusterCode.RELAY_REFUSED, sentence)) from None
        if frame.message:
            self._kept[frame.key] = frame.message
            asyncio.get_running_loop().call_later(KEPT_S, self._kept.pop, frame.key, None)
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT_BYTES:
                self._kept.popitem(last=False)
        if frame.key not in self._kept:
            sentence = "The agent's relay does not have a message any more that the coordinator wants repeated."
            raise ValueError(coded(ClusterCode.RELAY_REFUSED, sentence))
        return self._kept[frame.key]


SOCKET = "relay.sock"
MAX_PATH_BYTES = 107  # unix(7): 108 with the zero at the end
MAX_CHANNELS = 64  # one for each coordinator of the jobs of a host and each way to ping it
IDLE_S = 30.0  # a connection without calls is closed after this time
_OWN = (TO, PINGS, RELAY, "user-agent")
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_WORLD_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_WORLD_MESSAGE_BYTES),
    # Ranks ping the relay as often as they would ping a coordinator.
    ("grpc.http2.min_ping_interval_without_data_ms", 10),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10),
    ("grpc.http2.max_ping_strikes", 0),
)

log = logging.getLogger(__name__)

_Key = tuple[str, float, float, Any]


@dataclass
class _Upstream:
    """The connection to one coordinator."""

    channel: grpc.aio.Channel
    repeated: Repeated = field(default_factory=Repeated)
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    calls: int = 0
    idle: asyncio.TimerHandle | None = None


class Relay:
    """Call `start`, and `close` at the end, in one event loop."""

    def __init__(self, folder: Path, tls: ClientTls | None) -> None:
        """folder: one that only this user can enter. tls: the certificates of coordinators and of this host."""
        self._path = folder / SOCKET
        self._tls = tls
        self._upstreams: dict[_Key, _Upstream] = {}
        self._server: grpc.aio.Server | None = None

    @property
    def path(self) -> str:
        """The path of the socket; empty while the relay is not started."""
        return str(self._path) if self._server is not None else ""

    def serves(self, tls: ClientTls | None) -> bool:
        """Whether a rank with these settings would use the same TLS files for coordinators as this relay does."""
        return tls == self._tls

    async def start(self) -> None:
        """Begins to relay. If the socket can't be made, the ranks connect to coordinators themselves."""
        path = str(self._path)
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            log.info("Ranks connect to coordinators by themselves: %s is too long for the name of a socket.", path)
            return
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((_EveryMethod(self),))
        try:
            server.add_insecure_port(f"unix:{path}")
            os.chmod(path, 0o600)
            await server.start()
        except (RuntimeError, OSError) as error:
            log.warning("Ranks connect to coordinators by themselves: %s can't be listened on (%s).", path, error)
            await server.stop(None)
            return
        self._server = server

    async def close(self) -> None:
        """Ends all calls. Ranks that still run then connect to their coordinators."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)
            with contextlib.suppress(OSError):
                self._path.unlink()
        for upstream in self._upstreams.values():
            if upstream.idle is not None:
                upstream.idle.cancel()
            await upstream.channel.close()
        self._upstreams.clear()

    @contextlib.contextmanager
    def connection(self, pings: tuple[float, float], address: str) -> Iterator[grpc.aio.Channel]:
        """A connection for the agent's own calls, shared with its ranks if they ping alike. May raise StartError.

        pings: how long one may take and the time between two, in seconds.
        """
        key = self._key_of(address, *pings)
        upstream = self._upstream(key, is_own=True)
        try:
            yield upstream.channel
        finally:
            self._ended(key, upstream)

    async def relay(self, method: str, requests: AsyncIterator[bytes], context: Any) -> None:
        """Relays one call, of any kind, to its end."""
        given = [(key, value) for key, value in context.invocation_metadata() or ()]
        own = dict(given)
        try:
            key = self._key(own)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            upstream = self._upstream(key)
        except StartError as error:  # a file of a certificate can't be read
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        metadata = [(name, value) for name, value in given if name not in _OWN and not name.startswith("grpc-")]
        metadata.append((RELAY, upstream.id))
        sending: asyncio.Task[None] | None = None
        call: Any = None
        try:
            call = upstream.channel.stream_stream(method)(metadata=metadata, timeout=context.time_remaining())
            sending = asyncio.create_task(_send(requests, call))
            try:
                await _receive(call, context, upstream.repeated)
            except ValueError as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            code, details = await call.code(), await call.details()
            trailing = tuple(await call.trailing_metadata() or ())
            if code is not grpc.StatusCode.OK:
                await context.abort(code, details or "", trailing)
            context.set_trailing_metadata(trailing)
        finally:
            if call is not None:
                call.cancel()
            self._ended(key, upstream)
            if sending is not None:
                sending.cancel()

    # -- connections ---------------------------------------------------------------------------------------------------

    def _key(self, metadata: dict[str, Any]) -> _Key:
        """ValueError with a sentence."""
        address = str(metadata.get(TO, ""))
        split_address(address, TO)
        timeout, _, ping = str(metadata.get(PINGS, "")).partition(" ")
        try:
            pings = float(timeout), float(ping)
        except ValueError:
            sentence = f"{PINGS}={timeout!r} is not usable: expected two numbers of seconds."
            raise ValueError(coded(ClusterCode.RELAY_REFUSED, sentence)) from None
        if not all(0 < seconds < 1e9 for seconds in pings):
            sentence = f"{PINGS} names {pings[0]:g} and {pings[1]:g} s: expected two positive numbers."
            raise ValueError(coded(ClusterCode.RELAY_REFUSED, sentence))
        return self._key_of(address, *pings)

    def _key_of(self, address: str, timeout_s: float, ping_s: float) -> _Key:
        return address, timeout_s, ping_s, self._tls.stamp() if self._tls is not None else ()

    def _upstream(self, key: _Key, is_own: bool = False) -> _Upstream:
        found = self._upstreams.get(key)
        if found is None:
            if len(self._upstreams) >= MAX_CHANNELS and not is_own:
                sentence = f"The agent relays to {MAX_CHANNELS} coordinators already."
                raise StartError(coded(ClusterCode.RELAY_REFUSED, sentence))
            address, timeout_s, ping_s, _ = key
            found = self._upstreams[key] = _Upstream(open_aio_channel(address, self._tls, timeout_s, ping_s))
        found.calls += 1
        if found.idle is not None:
            found.idle.cancel()
            found.idle = None
        return found

    def _ended(self, key: _Key, upstream: _Upstream) -> None:
        upstream.calls -= 1
        if not upstream.calls and self._upstreams.get(key) is upstream:
            upstream.idle = asyncio.get_running_loop().call_later(IDLE_S, self._drop, key)

    def _drop(self, key: _Key) -> None:
        upstream = self._upstreams.pop(key)
        self._closing = asyncio.create_task(upstream.channel.close())


class _EveryMethod(grpc.GenericRpcHandler):
    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        method = handler_call_details.method

        async def relay(requests: AsyncIterator[bytes], context: Any) -> None:
            await self._relay.relay(method, requests, context)

        # HTTP/2 carries every kind of call as a stream of messages in each direction.
        handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(relay)
        return handler


async def _send(requests: AsyncIterator[bytes], call: Any) -> None:
    # A call that has ended takes no messages any more; _receive reads how it ended.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async for message in requests:
            await call.write(message)
        await call.done_writing()


async def _receive(call: Any, context: Any, repeated: Repeated) -> None:
    """Passes messages on until the coordinator has ended the call."""
    is_first, has_frames = True, False
    with contextlib.suppress(grpc.aio.AioRpcError):
        while (message := await call.read()) is not grpc.aio.EOF:
            if is_first:
                given = tuple(await call.initial_metadata() or ())
                if initial := tuple(pair for pair in given if pair[0] != RELAY):
                    await context.send_initial_metadata(initial)
                is_first, has_frames = False, len(initial) < len(given)
            await context.write(repeated.passing(message) if has_frames else message)
