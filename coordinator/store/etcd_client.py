"""Calls to a cluster of etcd: which endpoint answers, logins, deadlines, and what a failure says about the call.

A request that only reads, or may be made twice, goes to one endpoint after the other until its deadline. A write goes
out once, over a connection that stands: when its answer is lost, it is not known whether it happened, and sending it
again could do it twice, or find what it has written itself and take that for another client's (UncertainError).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from horovod.base.tasks import end_tasks
from horovod.protos.etcd import etcd_pb2 as pb

from .base import LeaseLostError, StoreError, TooLargeError, UncertainError, WritesRefusedError
from .etcd_address import EtcdAddress

CALL_S = 5.0  # seconds for a call with all its attempts
ATTEMPT_SHARE = 0.3  # share of CALL_S for an attempt at one endpoint, in case that node is stopped
WATCH_AGAIN_S = 0.1  # seconds between attempts to go on with a watch
# A node that hangs keeps the connection of a watch and says nothing. So it is asked for a word, which it gives at once:
# what a watch would tell is noticed elsewhere well within the grace that members have (core/world/life.py).
WATCH_ASK_S = 1.0
WATCH_SILENT_S = 3.0

_OPTIONS = (
    # An idle connection to a host that has vanished is noticed in 13 s; calls and watches have limits of their own.
    # etcd ends connections that ping more often than every 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", -1),  # no limit: etcd limits what can be written
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # http_proxy is for the Internet
)
# A node that has lost its cluster refuses, instead of answering from what it knew or waiting.
_REQUIRE_LEADER = ("hasleader", "true")
_NO_LEADER = "etcdserver: no leader"
_OLD_LOGINS = ("etcdserver: invalid auth token", "etcdserver: revision of auth store is old")
_TOO_LARGE = ("etcdserver: request is too large", "message larger than max")
_NO_SPACE = "database space exceeded"
_NOT_FROM_ETCD = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN)

Answer = TypeVar("Answer", bound=Message)


class EtcdClient:
    """Belongs to one event loop."""

    def __init__(self, address: EtcdAddress, call_s: float) -> None:
        self._address = address
        self._call_s = call_s
        self._attempt_s = call_s * ATTEMPT_SHARE
        self._channels: list[grpc.aio.Channel] = []  # one for each endpoint; made with the first call
        self._preferred = 0  # the endpoint that is asked first: one that has answered
        self._token = ""
        self._login = asyncio.Lock()  # one login at a time; the others use what it brings
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        for channel in self._channels:
            await channel.close()

    async def ask(self, method: str, request: Message, answer: type[Answer]) -> Answer:
        """A call that may be done twice. Raises StoreError when no endpoint has answered in time."""
        end = self._now() + self._call_s
        why: object = "no answer in time"
        while (left := end - self._now()) > 0:
            endpoint = self._preferred
            try:
                return await self._unary(method, request, answer, min(left, self._attempt_s))
            except grpc.aio.AioRpcError as error:
                why = error.details() or error.code().name
                self._judge(error)
            await self._leave(endpoint)
        raise self._unreachable(why)

    async def write(self, method: str, request: Message, answer: type[Answer]) -> Answer:
        """A call that is made once. Raises UncertainError when it may have happened, StoreError when it has not."""
        end = self._now() + self._call_s
        while True:
            await self._connect(end)
            endpoint = self._preferred
            try:
                return await self._unary(method, request, answer, max(0.1, end - self._now()))
            except grpc.aio.AioRpcError as error:
                refused = _was_refused(error)
                why = error.details() or error.code().name
                self._judge(error)
                await self._leave(endpoint)
                if not refused:
                    raise UncertainError(
                        f"{self._name()} did not answer whether a write was done: {why}. It may have been."
                    ) from None
                if self._now() >= end:
                    raise self._unreachable(why) from None

    async def watch(self, request: pb.WatchCreateRequest) -> AsyncIterator[pb.WatchResponse]:
        """What changes, until the connection breaks, or etcd ends it or is silent; each response is one that goes on.

        Raises StoreError when the client was closed, or etcd refuses for good.
        """
        metadata = await self._metadata_or_wait()
        if metadata is None:
            return
        endpoint = self._preferred
        call: Any = self._channel().stream_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=pb.WatchResponse.FromString,
        )(metadata=metadata)
        asking: asyncio.Task[None] | None = None
        try:
            await asyncio.wait_for(call.write(pb.WatchRequest(create_request=request)), WATCH_SILENT_S)
            asking = asyncio.create_task(_ask_for_words(call))
            while (response := await asyncio.wait_for(call.read(), WATCH_SILENT_S)) is not grpc.aio.EOF:
                if response.canceled and not response.compact_revision:
                    self._token = ""  # no token from before: an old login ends watches with a reason, not with a status
                    break
                yield response
        except grpc.aio.AioRpcError as error:
            self._judge(error)
        except asyncio.TimeoutError:
            self._check_open()
        except asyncio.InvalidStateError:  # the stream was dead before it was written to
            self._check_open()
        except asyncio.CancelledError:  # of this task, or of the stream by close()
            self._check_open()
            raise
        finally:
            call.cancel()
            if asking is not None:
                await end_tasks([asking])
        await self._leave(endpoint)
        await asyncio.sleep(WATCH_AGAIN_S)

    async def keep_alive(self, lease: int) -> int:
        """Keeps the lease alive. Returns its time to live in seconds; 0: the lease has ended."""
        end = self._now() + self._call_s
        why: object = "no answer in time"
        while (left := end - self._now()) > 0:
            endpoint = self._preferred
            try:
                call = self._channel().stream_stream(
                    "/etcdserverpb.Lease/LeaseKeepAlive",
                    request_serializer=pb.LeaseKeepAliveRequest.SerializeToString,
                    response_deserializer=pb.LeaseKeepAliveResponse.FromString,
                )(metadata=await self._metadata(), timeout=min(left, self._attempt_s))
                try:
                    await call.write(pb.LeaseKeepAliveRequest(ID=lease))
                    response: Any = await call.read()
                    if response is not grpc.aio.EOF:
                        return int(response.TTL)
                finally:
                    call.cancel()
            except grpc.aio.AioRpcError as error:
                why = error.details() or error.code().name
                self._judge(error)
            except asyncio.InvalidStateError:  # the stream was dead before it was written to
                why = "the connection broke"
            await self._leave(endpoint)
        raise self._unreachable(why)

    # -- inside --------------------------------------------------------------------------------------------------------
    async def _unary(self, method: str, request: Message, answer: type[Answer], timeout_s: float) -> Answer:
        call = self._channel().unary_unary(
            method, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
        )
        metadata = await self._metadata()
        response: Answer = await call(request, timeout=timeout_s, metadata=metadata)
        return response

    def _channel(self) -> grpc.aio.Channel:
        self._check_open()
        if not self._channels:
            address = self._address
            for endpoint in address.endpoints:
                if address.ca is None:
                    self._channels.append(grpc.aio.insecure_channel(endpoint, options=_OPTIONS))
                else:
                    credentials = grpc.ssl_channel_credentials(address.ca, address.key, address.cert)
                    self._channels.append(grpc.aio.secure_channel(endpoint, credentials, options=_OPTIONS))
        return self._channels[self._preferred]

    async def _connect(self, end: float) -> None:
        """Waits until the preferred endpoint has a connection; prefers another one when that gets none."""
        while (left := end - self._now()) > 0:
            endpoint = self._preferred
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._channel().channel_ready(), min(left, self._attempt_s))
                return
            await self._leave(endpoint)
        raise self._unreachable("no connection")

    async def _leave(self, endpoint: int) -> None:
        """Another one is preferred from now on, unless it is already: many calls find out at once that a node hangs."""
        self._check_open()
        following = (endpoint + 1) % len(self._address.endpoints)
        if self._preferred == endpoint:
            self._preferred = following
        if following == 0:
            await asyncio.sleep(0.05)  # all endpoints were asked; if they refuse connections, that took no time

    async def _metadata(self) -> tuple[tuple[str, str], ...]:
        if self._address.user is None:
            return (_REQUIRE_LEADER,)
        if not self._token:
            async with self._login:
                if not self._token:
                    self._token = await self._log_in()
        return (_REQUIRE_LEADER, ("token", self._token))

    async def _metadata_or_wait(self) -> tuple[tuple[str, str], ...] | None:
        endpoint = self._preferred
        try:
            return await self._metadata()
        except grpc.aio.AioRpcError as error:
            self._judge(error)
            await self._leave(endpoint)
            await asyncio.sleep(WATCH_AGAIN_S)
            return None

    async def _log_in(self) -> str:
        try:
            password = self._address.password()
        except ValueError as error:
            raise StoreError(str(error)) from None
        call = self._channel().unary_unary(
            "/etcdserverpb.Auth/Authenticate",
            request_serializer=pb.AuthenticateRequest.SerializeToString,
            response_deserializer=pb.AuthenticateResponse.FromString,
        )
        request = pb.AuthenticateRequest(name=self._address.user or "", password=password)
        response = await call(request, timeout=self._attempt_s)
        return str(response.token)

    def _judge(self, error: grpc.aio.AioRpcError) -> None:
        """Raises the error if another attempt would not change it."""
        self._check_open()
        details = error.details() or ""
        if any(old in details for old in _OLD_LOGINS):
            self._token = ""
            return
        if error.code() is grpc.StatusCode.NOT_FOUND and "lease" in details:
            raise LeaseLostError("The lease has ended or never was.") from None
        if not _was_refused(error) or _NO_LEADER in details:
            return
        if any(one in details for one in _TOO_LARGE):
            raise TooLargeError(f"{self._name()} refuses a write as too large: {details}.") from None
        if _NO_SPACE in details:
            raise WritesRefusedError(
                f"{self._name()} takes no writes, since its database has no space left (the alarm NOSPACE). Give it "
                "space (`etcdctl compact`, `etcdctl defrag`, or a larger --quota-backend-bytes), then `etcdctl alarm "
                "disarm`."
            ) from None
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            raise WritesRefusedError(f"{self._name()} does not allow this user to do that: {details}.") from None
        raise StoreError(f"{self._name()} refuses: {details}.") from None

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("The store is closed.")

    def _name(self) -> str:
        return "etcd at " + ", ".join(self._address.endpoints)

    def _unreachable(self, why: object) -> StoreError:
        return StoreError(f"{self._name()} can't be reached: {why}.")

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


async def _ask_for_words(call: Any) -> None:
    """For as long as the watch goes on; how it ended is read by whoever reads it."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await asyncio.sleep(WATCH_ASK_S)
            await call.write(pb.WatchRequest(progress_request=pb.WatchProgressRequest()))


def _was_refused(error: grpc.aio.AioRpcError) -> bool:
    """etcd has looked at the request and not done it."""
    details = error.details() or ""
    return error.code() not in (*_NOT_FROM_ETCD, grpc.StatusCode.CANCELLED) or _NO_LEADER in details
