"""Store, core and services put together: `CoordinatorServer` for an event loop, `EmbeddedCoordinator` for anybody."""

import asyncio
import errno
import logging
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

import grpc

from horovod.protos.v1.membership_pb2_grpc import add_MembershipServicer_to_server
from horovod.protos.v1.negotiation_pb2_grpc import add_NegotiationServicer_to_server

from .address import ListenAddress
from .services.auth import TokenInterceptor
from .services.hub import Hub
from .services.membership import MembershipService
from .services.negotiation import NegotiationService
from .store import MemoryStore, Store

MAX_REQUEST_BYTES = 8 << 20
START_TIMEOUT_S = 30.0
STOP_GRACE_S = 1.0

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else two coordinators on one port would each get some of the members
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # A process that died is noticed at once (its connection is reset); these are for hosts that vanish. A process that
    # is stopped for a while (a debugger, a busy machine) is no loss (docs/adr/0005-keepalive.md).
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Members ping every second; by default a server takes that for an attack.
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
    # Thousands of members may open their streams in the same moment.
    ("grpc.server.max_pending_requests", 1 << 16),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 17),
)


class CoordinatorServer:
    """One coordinator in the running event loop. Starts once and stops once."""

    def __init__(self, heartbeat_timeout_s: float = 30.0, told_level: int = logging.WARNING) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._told_level = told_level
        self._server: grpc.aio.Server | None = None
        self._hub: Hub | None = None
        self._clock_watch: asyncio.Task[None] | None = None

    async def start(self, listen: str, token: str | None = None, store: Store | None = None) -> int:
        """Serves on `listen` ("127.0.0.1:29400"; port 0 lets the system choose) and returns the port.

        Raises ValueError for a malformed address and OSError when it can't be listened on, both with a sentence.
        """
        address = ListenAddress.parse(listen)
        if address.port:
            address.check_free()
        interceptors = [TokenInterceptor(token)] if token else []
        server = grpc.aio.server(interceptors=interceptors, options=_OPTIONS)
        hub = Hub(
            store if store is not None else MemoryStore(),
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            told_level=self._told_level,
        )
        add_MembershipServicer_to_server(MembershipService(hub), server)
        add_NegotiationServicer_to_server(NegotiationService(hub), server)
        try:
            port = server.add_insecure_port(str(address))
        except RuntimeError as error:
            raise address.bind_error(errno.EADDRINUSE) from error
        if port == 0:
            raise address.bind_error(errno.EADDRINUSE)
        await server.start()
        self._server, self._hub = server, hub
        self._clock_watch = asyncio.create_task(hub.watch_clock())
        return port

    async def stop(self, grace: float = STOP_GRACE_S) -> None:
        """Ends all streams in words, and whatever remains after `grace` seconds. Idempotent."""
        server, self._server = self._server, None
        if server is None or self._hub is None or self._clock_watch is None:
            return
        self._clock_watch.cancel()
        await self._hub.stop()
        await server.stop(grace)


class EmbeddedCoordinator:
    """A coordinator in a thread of its own, with its own event loop; for horovodrun, notebooks and tests.

    with EmbeddedCoordinator() as coordinator:
        hvd.init(coordinator.address)
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        token: str | None = None,
        *,
        heartbeat_timeout_s: float = 30.0,
    ) -> None:
        self._listen = listen
        self._token = token
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._server: CoordinatorServer | None = None
        self._port = 0

    @property
    def address(self) -> str:
        """host:port that members connect to."""
        if self._thread is None:
            raise RuntimeError("The embedded coordinator does not run; call start() first.")
        return str(ListenAddress(ListenAddress.parse(self._listen).host, self._port))

    def start(self) -> "EmbeddedCoordinator":
        """Raises ValueError or OSError as CoordinatorServer.start does."""
        if self._thread is not None:
            raise RuntimeError("The embedded coordinator runs already.")
        ListenAddress.parse(self._listen)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="horovod-coordinator", daemon=True)
        self._thread.start()
        # Rank 0 mostly writes to the same terminal, where nobody wants to read everything twice.
        self._server = CoordinatorServer(self._heartbeat_timeout_s, told_level=logging.INFO)
        try:
            self._port = self._call(self._server.start(self._listen, self._token), START_TIMEOUT_S)
        except BaseException:
            self._end_thread()
            raise
        return self

    def stop(self, grace: float = STOP_GRACE_S) -> None:
        """Idempotent."""
        if self._thread is None or self._server is None:
            return
        try:
            self._call(self._server.stop(grace), grace + START_TIMEOUT_S)
        finally:
            self._end_thread()

    def __enter__(self) -> "EmbeddedCoordinator":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _call(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def _end_thread(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        asyncio.run_coroutine_threadsafe(_cancel_all_tasks(), self._loop).result(START_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_TIMEOUT_S)
        self._loop.close()
        self._thread = None


async def _cancel_all_tasks() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
