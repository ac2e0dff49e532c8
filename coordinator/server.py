"""A coordinator to run: `CoordinatorServer` in an event loop, `EmbeddedCoordinator` in a thread of any program."""

import asyncio
import errno
import logging
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

import grpc

from horovod import __version__
from horovod.protos.v1.agents_pb2 import AgentMessage, GetCodeRequest
from horovod.protos.v1.membership_pb2 import MemberMessage, ServesRequest
from horovod.protos.v1.negotiation_pb2 import NegotiationMessage
from horovod.telemetry import Registry
from horovod.telemetry.http import WebServer

from .address import ListenAddress, is_free, reason_of
from .core.deadlock import USUAL_TIMES, DeadlockTimes
from .core.formation import MAX_WORLD_BYTES
from .core.overview import JobOverview
from .core.rates import RateLimits, Rates
from .exposure import check_exposure, check_web_exposure
from .job_token import MIN_CLUSTER_TOKEN_LENGTH, job_token
from .limits import Limits
from .services.agents import AgentsService
from .services.auth import Access
from .services.cluster import ClusterHub
from .services.exchange import Exchange
from .services.health import add_health_to_server
from .services.hub import Hub
from .services.jobs import JobsService, add_jobs_to_server
from .services.membership import MembershipService
from .services.negotiation import NegotiationService
from .services.peers import Peers
from .services.sending import Sending, add_call_to_server, add_stream_to_server
from .store import MemoryStore, Store
from .store.measured import MeasuredStore
from .tasks import end_tasks
from .tls import ServerTls
from .token import MAX_TOKEN_LENGTH, TokenFiles, is_token, random_token
from .web.ready import Readiness
from .web.server import Shown, web_server

MAX_REQUEST_BYTES = 8 << 20
RATES = Rates()
START_TIMEOUT_S = 30.0
STOP_GRACE_S = 1.0
KEEP_TOKEN_S = 60.0  # how often a coordinator looks whether its token can still be found

_log = logging.getLogger(__name__)

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else two coordinators on one port would each get some of the members
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_WORLD_BYTES),
    # Members ping every few seconds. By default a server ends the connection of a client that pings that often while
    # nothing else is sent.
    ("grpc.http2.min_ping_interval_without_data_ms", 10),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10),
    ("grpc.http2.max_ping_strikes", 0),
    # Thousands of members may open their streams in the same moment.
    ("grpc.server.max_pending_requests", 1 << 16),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 17),
)


class CoordinatorServer:
    """One coordinator in the running event loop. Starts once and stops once."""

    def __init__(
        self,
        limits: Limits | None = None,
        told_level: int = logging.WARNING,
        keep_token_s: float = KEEP_TOKEN_S,
        deadlock: DeadlockTimes = USUAL_TIMES,
    ) -> None:
        self._limits = limits or Limits()
        self._told_level = told_level
        self._keep_token_s = keep_token_s
        self._deadlock = deadlock
        self._server: grpc.aio.Server | None = None
        self._hub: Hub | None = None
        self._cluster: ClusterHub | None = None
        self._store: Store | None = None
        self._ready: Readiness
        self._listening = ""
        self._web: WebServer | None = None
        self._clock_watch: asyncio.Task[None] | None = None
        self._serving: list[asyncio.Task[None]] = []
        self._token_files: TokenFiles | None = None
        self._token_watch: asyncio.Task[None] | None = None

    async def start(
        self,
        listen: str,
        token: str | None = None,
        store: Store | None = None,
        *,
        token_files: TokenFiles | None = None,
        advertise: str | None = None,
        tls: ServerTls | None = None,
        insecure: bool = False,
        exchange: Exchange | None = None,
    ) -> int:
        """Serves on `listen` ("127.0.0.1:29400"; port 0 lets the system choose) and returns the port.

        token: members must know it, or that of their job made from it; None serves every process that can connect.
        store: closed with the server.
        token_files: where processes of this user find the token while the coordinator runs.
        advertise: HOST:PORT where members and other coordinators of the store reach this one; `listen` by default.
        tls: the certificate by which members know the coordinator, and whose members it takes.
        insecure: serves strangers of other hosts, too.
        exchange: what ranks of horovod.run fetch and deliver here.

        Raises ValueError for a malformed address or token, or for one that strangers could reach, and OSError when the
        address can't be listened on, or token or certificate can't be used, all with a sentence.
        """
        address = ListenAddress.parse(listen)
        if token is not None and not is_token(token):
            raise ValueError(
                "The token for a coordinator is not usable: expected one line of ASCII text without spaces, "
                f"{MAX_TOKEN_LENGTH} characters at most."
            )
        warning = check_exposure(address, token, tls, insecure)
        credentials = tls.credentials() if tls is not None else None
        is_shared = store is not None and not isinstance(store, MemoryStore)
        if tls is not None and is_shared:
            tls.check_between(ListenAddress.parse(advertise).host if advertise else address.host)
        peers = Peers(token, tls if is_shared else None)
        access = Access(token, RateLimits(RATES))
        # A process that died is noticed at once: its connection is reset, and its pidfd tells on this host. Keepalive
        # is for hosts that vanish. A member that misses it is only away (services/processes.py, core/life.py): where
        # its process is seen to live, stopped or not, it is not lost.
        options = (*_OPTIONS, *self._limits.channel_options())
        server = grpc.aio.server(interceptors=access.interceptors(), options=options)
        hub: Hub
        cluster: ClusterHub

        def observe(seconds: float, operation: str, result: str) -> None:
            hub.metrics.store_seconds.observe(seconds, operation, result)

        self._store = MeasuredStore(store if store is not None else MemoryStore(), observe)
        self._ready = Readiness(self._store)
        hub = Hub(
            self._store,
            limits=self._limits,
            deadlock=self._deadlock,
            told_level=self._told_level,
            peers=peers,
            has_agent=lambda job, rank: cluster.watches(job, rank),  # noqa: PLW0108 - it is made below
        )
        sending = Sending()
        membership = MembershipService(hub, access, sending)
        negotiation = NegotiationService(hub, access, sending)
        add_stream_to_server(server, "horovod.v1.Membership", "Join", membership.Join, MemberMessage)
        add_call_to_server(server, "horovod.v1.Membership", "Serves", membership.Serves, ServesRequest)
        add_stream_to_server(server, "horovod.v1.Negotiation", "Negotiate", negotiation.Negotiate, NegotiationMessage)
        cluster = ClusterHub(
            self._store,
            __version__,
            limits=self._limits,
            token=lambda job: _token_for(token, job),
            rank_ended=hub.rank_ended,
        )
        agents = AgentsService(cluster, access, sending)
        add_stream_to_server(server, "horovod.v1.Agents", "Attach", agents.Attach, AgentMessage)
        add_call_to_server(server, "horovod.v1.Agents", "GetCode", agents.GetCode, GetCodeRequest)
        add_jobs_to_server(server, JobsService(cluster, access, sending))
        add_health_to_server(self._ready, server)
        if exchange is not None:
            server.add_generic_rpc_handlers((exchange.handler(access),))
        if token_files is None:
            port = _bind(server, address, credentials)
        else:
            try:
                port = await _bind_and_tell(server, address, credentials, token_files)
            except BaseException:
                await server.stop(None)  # frees the address
                raise
            self._token_files = token_files
            self._token_watch = asyncio.create_task(_keep(token_files, self._keep_token_s))
        hub.serving.address = advertise or str(ListenAddress(address.host, port))
        await cluster.start()
        await server.start()
        if warning:
            _log.warning("%s", warning)
        self._server, self._hub, self._cluster = server, hub, cluster
        work = (hub.serving.keep(), hub.serving.watch(), hub.outcomes.watch())
        self._serving = [asyncio.create_task(one) for one in work]
        self._clock_watch = asyncio.create_task(hub.watch_clock())
        self._listening = str(ListenAddress(address.host, port))
        return port

    async def start_web(
        self, listen: str, token: str | None = None, *, tls: ServerTls | None = None, insecure: bool = False
    ) -> int:
        """Serves the pages of web/server.py on a port of their own, which is returned; after `start`.

        token: asked for by all pages but the probes'; None: they are open.
        tls: with whose certificate they are served over HTTPS.
        insecure: open also where other hosts can connect.

        ValueError and OSError as `start`.
        """
        if self._hub is None:
            raise RuntimeError("The coordinator does not run; call start() first.")
        address = ListenAddress.parse(listen)
        warning = check_web_exposure(address, token, tls is not None, insecure)
        web = web_server(Shown(self._hub.overview, self._hub.metrics.registry, self._ready, self._listening), token)
        try:
            port = await web.start(address.host, address.port, tls.web_context() if tls is not None else None)
        except OSError as error:
            raise address.bind_error(error.errno or errno.EADDRNOTAVAIL) from error
        self._web = web
        if warning:
            _log.warning("%s", warning)
        return port

    @property
    def registry(self) -> Registry:
        """The metrics; after `start`."""
        if self._hub is None:
            raise RuntimeError("The coordinator does not run; call start() first.")
        return self._hub.metrics.registry

    def overview(self) -> list[JobOverview]:
        """All jobs as they are now. Any thread."""
        return [] if self._hub is None else self._hub.overview()

    async def wait_until_empty(self, timeout_s: float) -> bool:
        """Waits until no world has a member; False when some has after that time."""
        return self._hub is None or await self._hub.wait_until_empty(timeout_s)

    async def stop(self, grace: float = STOP_GRACE_S) -> None:
        """Ends all streams in words, and whatever remains after `grace` seconds. Idempotent."""
        server, self._server = self._server, None
        if server is None or self._hub is None or self._clock_watch is None:
            return
        self._clock_watch.cancel()
        for task in self._serving:
            task.cancel()
        if self._web is not None:
            await self._web.stop()
        if self._token_files is not None and self._token_watch is not None:
            self._token_watch.cancel()
            self._token_files.remove()
        if self._cluster is not None:
            await self._cluster.stop()
        await self._hub.stop()
        await server.stop(grace)
        if self._store is not None:
            await self._store.close()


def _token_for(token: str | None, job: str) -> str:
    """With what the ranks of a job join: its own token, unless the cluster's is too short to make one of."""
    if token is None or len(token) < MIN_CLUSTER_TOKEN_LENGTH:
        return token or ""
    return job_token(token, job)


def _bind(server: grpc.aio.Server, address: ListenAddress, credentials: grpc.ServerCredentials | None) -> int:
    """The port. From now on connections are accepted; they are served when the server starts."""
    if address.port:
        address.check_free()
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError as error:
        address.check_free()  # knows more
        raise address.bind_error(errno.EADDRINUSE) from error
    if port == 0:
        raise address.bind_error(errno.EADDRINUSE)
    return port


async def _bind_and_tell(
    server: grpc.aio.Server, address: ListenAddress, credentials: grpc.ServerCredentials | None, files: TokenFiles
) -> int:
    """As `_bind`. A member that can connect to a port which it was told can also find the token."""
    async with files.locked():
        files.remove_stale(is_free)
        addresses = address.resolved()
        if address.port:
            address.check_free()
            files.write(addresses, address.port)
        try:
            port = _bind(server, address, credentials)
            if not address.port:
                files.write(addresses, port)
        except BaseException:
            files.remove()
            raise
    return port


async def _keep(files: TokenFiles, period_s: float) -> None:
    """Sees to it that members that come later find the token, for ever."""
    told = ""
    while True:
        await asyncio.sleep(period_s)
        try:
            files.keep()
            told = ""
        except OSError as error:
            if told != (error.strerror or str(error)):
                told = error.strerror or str(error)
                _log.warning("%s", told)


class EmbeddedCoordinator:
    """A coordinator in a thread of its own, with its own event loop; for horovodrun, notebooks and tests.

    with EmbeddedCoordinator() as coordinator:
        hvd.init(coordinator.address)

    token: members must know it. Without one the coordinator makes one, `token`; when it listens on the loopback
        interface only, as it does by default, processes of this user find it by themselves, others of this host don't.
    insecure: serves every process that can connect, without a token, and shows its pages to everybody.
    tls: the certificate by which members know it (HOROVOD_TLS_CA), and whose members it takes.
    exchange: what ranks of horovod.run fetch and deliver here.
    web_listen: where to show the pages of web/server.py; None: nowhere.
    web_token: readers must send it as a bearer token; needed where other hosts can connect.
    web_tls: shows the pages over HTTPS, with the certificate of `tls`.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        token: str | None = None,
        *,
        insecure: bool = False,
        tls: ServerTls | None = None,
        exchange: Exchange | None = None,
        web_listen: str | None = None,
        web_token: str | None = None,
        web_tls: bool = False,
        limits: Limits | None = None,
        keep_token_s: float = KEEP_TOKEN_S,
        deadlock: DeadlockTimes = USUAL_TIMES,
    ) -> None:
        self._listen = listen
        self._finds_token = token is None and not insecure
        self._token = random_token() if self._finds_token else token
        self._insecure = insecure
        self._tls = tls
        self._exchange = exchange
        if web_tls and tls is None:
            raise ValueError(
                "web_tls=True shows the pages with the coordinator's certificate, and it has none: give tls=."
            )
        self._web_listen = web_listen
        self._web_token = web_token
        self._web_tls = web_tls
        self._web_port = 0
        self._limits = limits
        self._keep_token_s = keep_token_s
        self._deadlock = deadlock
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

    @property
    def server(self) -> CoordinatorServer | None:
        """What runs in its thread; None before `start`."""
        return self._server

    @property
    def web_address(self) -> str:
        """Where its pages are, "http://127.0.0.1:41234"; only with `web_listen`."""
        if self._web_listen is None or not self._web_port:
            raise RuntimeError("The embedded coordinator shows no pages; give it web_listen and call start().")
        scheme = "https" if self._web_tls else "http"
        return f"{scheme}://{ListenAddress(ListenAddress.parse(self._web_listen).host, self._web_port)}"

    @property
    def token(self) -> str | None:
        """What members must know (HOROVOD_TOKEN); None when it asks for none."""
        return self._token

    def start(self) -> "EmbeddedCoordinator":
        """Raises ValueError or OSError as CoordinatorServer.start does."""
        if self._thread is not None:
            raise RuntimeError("The embedded coordinator runs already.")
        address = ListenAddress.parse(self._listen)
        files = TokenFiles(self._token) if self._finds_token and self._token and address.is_loopback() else None
        try:
            self._loop = asyncio.new_event_loop()
        except OSError as error:
            number = error.errno or errno.EMFILE
            raise OSError(number, f"The coordinator cannot be started: {reason_of(number)}.") from error
        self._thread = threading.Thread(target=self._loop.run_forever, name="horovod-coordinator", daemon=True)
        self._thread.start()
        # Rank 0 mostly writes to the same terminal, so a sentence on both would be read twice.
        self._server = CoordinatorServer(
            self._limits,
            told_level=logging.INFO,
            keep_token_s=self._keep_token_s,
            deadlock=self._deadlock,
        )
        try:
            start = self._server.start(
                self._listen,
                self._token,
                token_files=files,
                tls=self._tls,
                insecure=self._insecure,
                exchange=self._exchange,
            )
            self._port = self._call(start, START_TIMEOUT_S)
            if self._web_listen is not None:
                web_tls = self._tls if self._web_tls else None
                web = self._server.start_web(self._web_listen, self._web_token, tls=web_tls, insecure=self._insecure)
                self._web_port = self._call(web, START_TIMEOUT_S)
        except BaseException:
            self._call(self._server.stop(0), START_TIMEOUT_S)
            self._end_thread()
            raise
        return self

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Waits until no world has a member; False when some has after that time."""
        if self._server is None:
            return True
        return bool(self._call(self._server.wait_until_empty(timeout_s), timeout_s + START_TIMEOUT_S))

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
    await end_tasks(tasks)
