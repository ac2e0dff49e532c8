"""The gRPC channel to the coordinator, which every client opens by `open_channel`: its options, TLS, and sentences for
the statuses with which calls end.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from horovod.base.errors import AccessCode, ErrorCode, WorldCode, code_of, coded, without_code
from horovod.base.protocol import KEEPALIVE_S, MAX_WORLD_MESSAGE_BYTES, ping_options
from horovod.base.words import printable
from horovod.worker.runtime.errors import StartError

if TYPE_CHECKING:
    from horovod.worker.runtime.tls import ClientTls


# A gRPC channel that takes new certificates while it is used.
#
# gRPC's channel keeps the credentials that it was made with. This one makes another when the files have changed, for
# the calls that begin from then on, and closes the older one when nothing runs on it any more.

UNARY_SECONDS = (
    60.0  # an older channel lives on for so long at least: only streams are counted, and other calls are short
)

log = logging.getLogger(__name__)


@dataclass
class _Generation:
    channel: grpc.Channel
    streams: int = 0
    replaced_at: float = 0.0


class RenewedChannel(grpc.Channel):
    """As the channels that `make` makes; `stamp` is a value that is another one when a new channel is to be made."""

    def __init__(self, stamp: Callable[[], Any], make: Callable[[], grpc.Channel]) -> None:
        self._stamp = stamp
        self._make = make
        self._lock = threading.Lock()  # guards what follows
        self._seen = stamp()
        self._latest = _Generation(make())
        self._older: list[_Generation] = []
        self._closed = False

    def unary_unary(self, *form: Any, **more: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            return self._for_call().channel.unary_unary(*form, **more)(*arguments, **options)

        return call

    def unary_stream(self, *form: Any, **more: Any) -> Any:
        return self._streams("unary_stream", form, more)

    def stream_unary(self, *form: Any, **more: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            return self._for_call().channel.stream_unary(*form, **more)(*arguments, **options)

        return call

    def stream_stream(self, *form: Any, **more: Any) -> Any:
        return self._streams("stream_stream", form, more)

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        self._latest.channel.subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Any) -> None:
        self._latest.channel.unsubscribe(callback)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            generations = [*self._older, self._latest]
        for generation in generations:
            generation.channel.close()

    def __enter__(self) -> RenewedChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _streams(self, kind: str, form: tuple[Any, ...], more: dict[str, Any]) -> Any:
        def begin(*arguments: Any, **options: Any) -> Any:
            generation = self._for_call(1)
            try:
                call = getattr(generation.channel, kind)(*form, **more)(*arguments, **options)
            except BaseException:
                self._ended(generation)
                raise
            call.add_done_callback(lambda _: self._ended(generation))
            return call

        return begin

    def _for_call(self, streams: int = 0) -> _Generation:
        unused: list[_Generation] = []
        with self._lock:
            stamp = self._stamp()
            if stamp != self._seen and not self._closed:
                self._renew(stamp)
            if self._older:
                before = time.monotonic() - UNARY_SECONDS
                unused = [older for older in self._older if not older.streams and older.replaced_at < before]
                self._older = [older for older in self._older if older not in unused]
            self._latest.streams += streams
            latest = self._latest
        for older in unused:
            older.channel.close()
        return latest

    def _renew(self, stamp: Any) -> None:
        try:
            channel = self._make()
        except StartError as error:  # a pair of files that is half written; it is looked at again when it changes
            log.warning("%s The certificate from before stays in use.", without_code(error))
        else:
            self._latest.replaced_at = time.monotonic()
            self._older.append(self._latest)
            self._latest = _Generation(channel)
        self._seen = stamp

    def _ended(self, generation: _Generation) -> None:
        with self._lock:
            generation.streams -= 1


def channel_options(
    keepalive_timeout_seconds: float, keepalive_seconds: float = KEEPALIVE_S
) -> tuple[tuple[str, int], ...]:
    # A coordinator that died is noticed at once: its connection is reset. Keepalive is for hosts that vanish; gRPC's
    # threads send and answer it without the GIL. The limits are long because on a machine with ten times more work than
    # processors a healthy process was seen to miss half a second (docs/adr/0015-liveness.md).
    return (
        *ping_options(keepalive_timeout_seconds, keepalive_seconds),
        ("grpc.max_receive_message_length", MAX_WORLD_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 50),
        # Also bounds one attempt to connect, so it must leave room for slow networks.
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # A channel is its session's own: no connection or backoff is shared with an earlier one, no proxy is asked.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    )


def open_channel(
    address: str,
    tls: ClientTls | None,
    keepalive_timeout_seconds: float = 20.0,
    keepalive_seconds: float = KEEPALIVE_S,
    relay: str = "",
) -> grpc.Channel:
    """Closed by the caller. With TLS, calls that begin after a file has changed go over a connection with the new one.

    relay: the socket of the agent that speaks to the coordinator instead, in whose metadata calls need
    `relayed.headers`. StartError with a sentence when a file can't be read.
    """
    options: tuple[tuple[str, int | str], ...] = channel_options(keepalive_timeout_seconds, keepalive_seconds)
    if relay:
        # gRPC would send the escaped path of the socket as the server's name, which is no name of a server.
        return grpc.insecure_channel(f"unix:{relay}", options=(*options, ("grpc.default_authority", address)))
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    if tls.server_name is not None:
        options = (*options, ("grpc.ssl_target_name_override", tls.server_name))
    return RenewedChannel(tls.stamp, lambda: grpc.secure_channel(address, tls.checked_credentials(), options=options))


def open_aio_channel(
    address: str,
    tls: ClientTls | None,
    keepalive_timeout_seconds: float = 20.0,
    keepalive_seconds: float = KEEPALIVE_S,
) -> grpc.aio.Channel:
    """For the event loop of an agent or a launcher; one for each attempt, so that it reads the files as they are."""
    options: tuple[tuple[str, int | str], ...] = channel_options(keepalive_timeout_seconds, keepalive_seconds)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if tls.server_name is not None:
        options = (*options, ("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(address, tls.checked_credentials(), options=options)


_HELPLESS = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.OUT_OF_RANGE,
}


def waiting_helps(code: grpc.StatusCode) -> bool:
    """Whether a later call may succeed; False for a status that the same request always gets."""
    return code not in _HELPLESS


def broke_in_write(code: grpc.StatusCode, details: str) -> bool:
    """Whether it says no more than that a message could not be sent: the call had ended, and gRPC forgot with what.

    The status is made by grpc.aio itself (grpc/aio/_call.py, `set_internal_error`), not by a server.
    """
    return code is grpc.StatusCode.INTERNAL and details == "Internal error from Core"


def explain(code: grpc.StatusCode, details: str, address: str, with_token: bool) -> str:
    """The sentence for a call that the coordinator ended with a status."""
    said = code_of(details)
    details = without_code(details).strip() or "without a reason"
    end = "" if details.endswith((".", "!", "?")) else "."
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        which = "the token of this process" if with_token else "this process, which has no token"
        return coded(
            said or AccessCode.WRONG_TOKEN,
            f"The coordinator at {address} refused {which}: {details}{end} Set HOROVOD_TOKEN to the token of its job.",
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return coded(
            said or WorldCode.NOT_A_COORDINATOR,
            f"The gRPC server at {address} is not a Horovod coordinator ({details}). Check the host and the port in "
            "HOROVOD_COORDINATOR.",
        )
    if code is grpc.StatusCode.INTERNAL:
        return coded(
            said or WorldCode.NOT_A_COORDINATOR,
            f"The server at {address} sent an answer that this process does not understand ({details}). Check "
            "that it is a Horovod coordinator of this version.",
        )
    return coded(said or _ended_with(code), f"The coordinator at {address} ended the call: {details}{end}")


def _ended_with(code: grpc.StatusCode) -> ErrorCode:
    """For a status to which no coordinator gave a code: it may come from gRPC, or from a proxy on the way."""
    return WorldCode.COORDINATOR_UNREACHABLE if waiting_helps(code) else WorldCode.COORDINATOR_REFUSED


def status_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Code and text of an error. A sync call raises itself, which its class does not say."""
    call: Any = error
    if not hasattr(call, "code"):
        return grpc.StatusCode.UNKNOWN, str(error)
    return call.code(), printable(call.details() or "")


def resolve(host: str, port: int) -> frozenset[tuple[str, int]]:
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset((str(row[4][0]), port) for row in rows)
