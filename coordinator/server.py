"""A coordinator to run: `CoordinatorServer` in an event loop, `EmbeddedCoordinator` in a thread of any program."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any

import grpc

from horovod.base.addresses import loopback_listen
from horovod.base.errors import ClusterCode, EngineCode, coded
from horovod.base.tasks import end_tasks
from horovod.base.telemetry import Registry
from horovod.base.telemetry.http import link_of
from horovod.protos.v1.story_pb2 import StoryEntry

from .address import ListenAddress, bind, bind_and_tell, keep, reason_of
from .config import CoordinatorConfig
from .core.ending import RankEnded
from .core.rates import RateLimits, Rates
from .core.world.membership import JobOverview
from .exposure import check_exposure, check_web_exposure
from .in_process import InProcessScheduler
from .pages import Readiness, Shown, web_server
from .parts import add_services, check_token, make_hubs, make_peers, make_server
from .services.auth import Access
from .services.cluster import ClusterHub
from .services.hub import Hub
from .token import TokenFiles, random_token


def quiet(loop: asyncio.AbstractEventLoop) -> None:
    """The loop does not report wake-ups that were meant for another one.

    grpcio, up to version 1.78 at least, wakes all loops of a process when a call of any of them has news, by one
    pipe; each that finds it empty reports a BlockingIOError, with a traceback on stderr. Nothing is lost by that.
    """
    loop.set_exception_handler(_handle)


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    is_wakeup = "PollerCompletionQueue" in str(context.get("message"))
    if not (is_wakeup and isinstance(context.get("exception"), BlockingIOError)):
        loop.default_exception_handler(context)


RATES = Rates()
START_TIMEOUT_S = 30.0
STOP_GRACE_S = 1.0

_log = logging.getLogger(__name__)


class CoordinatorServer:
    """One coordinator in the running event loop. Starts once and stops once.

    What is opened for it is put on a stack at once, which is closed in reverse order: by `stop`, and when a later part
    can't be opened. The parts are made in parts.py.
    """

    def __init__(self, config: CoordinatorConfig | None = None) -> None:
        self.port = 0  # port for members, known after `start`
        self.web_port = 0  # port of the pages, known after `start` if the configuration asks for pages
        # Token that readers of the pages show; if none was configured, one is made by `start`.
        self._config = config = config or CoordinatorConfig()
        self.web_token = config.web_token
        # Link to the pages for a browser; holds the token only if this coordinator made it, so that nobody else knows
        # it.
        self.web_link = ""
        self._opened = contextlib.AsyncExitStack()
        self._grace_s: float | None = None  # grace for calls that run when the server stops
        self._hub: Hub | None = None
        self._cluster: ClusterHub | None = None

    async def start(self) -> int:
        """Serves until `stop`. Returns the port.

        Raises ValueError for a malformed address or token, or for one that strangers could reach, and OSError when the
        address can't be listened on, or token or certificate can't be used, all with a sentence.
        """
        try:
            await self._open()
        except BaseException:
            await self._opened.aclose()
            raise
        return self.port

    async def _open(self) -> None:
        config, opened = self._config, self._opened
        store = config.open_store()
        opened.push_async_callback(store.close)
        address = ListenAddress.parse(config.listen)
        check_token(config.token)
        check_exposure(address, config.token, config.tls, config.insecure)
        credentials = config.tls.credentials() if config.tls is not None else None
        peers = make_peers(config, address, store.is_shared)
        certificate = config.tls.certificate() if config.proves_token and config.tls is not None else None
        access = Access(config.token, RateLimits(RATES), certificate)
        server = make_server(config, access)
        opened.push_async_callback(self._stop_server, server)
        measured, hub, cluster = make_hubs(config, store, peers)
        opened.push_async_callback(hub.stop)
        opened.push_async_callback(cluster.stop)
        ready = Readiness(measured)
        add_services(server, config, access, hub, cluster, ready)
        self.port = await self._listen(server, address, credentials)
        access.strangers.ports = {self.port}
        bound = ListenAddress(address.host, self.port)
        hub.sights.port, hub.serving.address = self.port, config.advertise or str(bound)
        await cluster.start(hub.serving.address)
        await server.start()
        if warning := check_exposure(bound, config.token, config.tls, config.insecure, config.tls_advice):
            _log.warning("%s", warning)
        for work in (
            hub.serving.keep,
            hub.serving.watch,
            hub.outcomes.watch,
            hub.orphans.watch,
            hub.watch_clock,
            access.strangers.watch,
        ):
            self._run(work())
        self._hub, self._cluster = hub, cluster
        if config.web_listen is not None:
            shown = Shown(hub.overview, hub.metrics.registry, ready, str(bound))
            self.web_port = await self._show(config.web_listen, shown)

    async def _listen(
        self, server: grpc.aio.Server, address: ListenAddress, credentials: grpc.ServerCredentials | None
    ) -> int:
        if not self._config.shows_token or self._config.token is None:
            return bind(server, address, credentials)
        files = TokenFiles(self._config.token)
        port = await bind_and_tell(server, address, credentials, files)
        self._opened.callback(files.remove)
        self._run(keep(files, self._config.keep_token_s))
        return port

    async def _show(self, listen: str, shown: Shown) -> int:
        """Serves the pages of pages.py on a port of their own, which is returned."""
        config, address = self._config, ListenAddress.parse(listen)
        tls = config.tls if config.web_tls else None
        warning = check_web_exposure(address, config.web_token, tls is not None, config.insecure)
        self.web_token = config.web_token or (None if config.insecure else random_token())
        # Off loopback it is not known by which names this host is reached, so there the token alone decides.
        host_names = frozenset({"localhost", address.host.lower()}) if address.is_loopback() else None
        web = web_server(shown, self.web_token, host_names)
        try:
            port = await web.start(address.host, address.port, tls.web_context() if tls is not None else None)
        except OSError as error:
            raise address.bind_error(error.errno or errno.EADDRNOTAVAIL) from error
        self._opened.push_async_callback(web.stop)
        if warning:
            _log.warning("%s", warning)
        where = f"{'https' if tls is not None else 'http'}://{ListenAddress(address.host, port)}"
        made = self.web_token is not None and config.web_token is None
        self.web_link = link_of(where, self.web_token) if made and self.web_token else where
        return port

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` in a task, which is cancelled when the server closes what it has opened."""
        self._opened.callback(asyncio.create_task(work).cancel)

    async def _stop_server(self, server: grpc.aio.Server) -> None:
        await server.stop(self._grace_s)

    @property
    def registry(self) -> Registry:
        """The metrics; after `start`."""
        if self._hub is None:
            raise _not_running("The coordinator does not run; call start() first.")
        return self._hub.metrics.registry

    @property
    def cluster(self) -> ClusterHub:
        """What schedules jobs; after `start`."""
        if self._cluster is None:
            raise _not_running("The coordinator does not run; call start() first.")
        return self._cluster

    def overview(self) -> list[JobOverview]:
        """All jobs as they are now. Any thread."""
        return [] if self._hub is None else self._hub.overview()

    def story(self, job: str) -> Sequence[StoryEntry]:
        """What has happened to the job, the oldest first; also of one that has just ended. Any thread."""
        return () if self._hub is None else self._hub.stories.entries(job)

    def latest_epoch(self, job: str) -> int | None:
        """As `Membership.latest_epoch` (core/world/membership.py)."""
        return None if self._hub is None else self._hub.latest_epoch(job)

    def give_up(self, job: str, sentence: str) -> None:
        """As `Membership.give_up` (core/world/membership.py)."""
        if self._hub is not None:
            self._hub.give_up(job, sentence)

    def end(self, job: str, cause: str) -> None:
        """As `Membership.end` (core/world/membership.py)."""
        if self._hub is not None:
            self._hub.end(job, cause)

    def rank_ended(self, ended: RankEnded) -> None:
        """As `Membership.rank_ended` (core/world/membership.py)."""
        if self._hub is not None:
            self._hub.rank_ended(ended)

    def ask_to_leave(self, job: str, slot: int, incarnation: int, reason: str) -> None:
        """As `Membership.ask_to_leave` (core/world/membership.py)."""
        if self._hub is not None:
            self._hub.ask_to_leave(job, slot, incarnation, reason)

    async def wait_until_empty(self, timeout_s: float) -> bool:
        """Waits until no world has a member; False when some has after that time."""
        return self._hub is None or await self._hub.wait_until_empty(timeout_s)

    async def stop(self, grace: float = STOP_GRACE_S) -> None:
        """Ends all streams in words, and whatever remains after `grace` seconds. Idempotent."""
        self._grace_s = grace
        await self._opened.aclose()


class EmbeddedCoordinator:
    """A coordinator in a thread of its own, with its own event loop; for horovodrun, notebooks and tests.

    with EmbeddedCoordinator() as coordinator:
        hvd.init(coordinator.address)

    token: members must know it. Without one the coordinator makes one, `token`; when it listens on the loopback
        interface only, as it does by default, processes of this user find it by themselves, others of this host don't.
    insecure: serves every process that can connect, without a token, and shows its pages to everybody.
    others: of CoordinatorConfig.
    """

    def __init__(self, listen: str | None = None, token: str | None = None, **others: Any) -> None:
        config = CoordinatorConfig(listen or loopback_listen(), token, **others)
        self._makes_token = token is None and not config.insecure
        self.config = dataclasses.replace(
            config,
            token=random_token() if self._makes_token else token,
            told_level=logging.INFO,  # rank 0 mostly writes to the same terminal, so a sentence would be read twice
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._server: CoordinatorServer | None = None

    @classmethod
    def of(cls, config: CoordinatorConfig) -> EmbeddedCoordinator:
        return cls(**vars(config))

    @property
    def address(self) -> str:
        """host:port that members connect to."""
        if self._thread is None or self._server is None:
            raise _not_running("The embedded coordinator does not run; call start() first.")
        return str(ListenAddress(ListenAddress.parse(self.config.listen).host, self._server.port))

    @property
    def server(self) -> CoordinatorServer | None:
        """What runs in its thread; None before `start`."""
        return self._server

    def scheduler(self) -> InProcessScheduler:
        """For a launcher in this process, in whose event loop this is called."""
        if self._loop is None or self._server is None:
            raise _not_running("The embedded coordinator does not run; call start() first.")
        return InProcessScheduler(self._server.cluster, self._loop)

    @property
    def web_address(self) -> str:
        """Where its pages are, "http://127.0.0.1:41234"; only with `web_listen`."""
        if self.config.web_listen is None or self._server is None or not self._server.web_port:
            raise _not_running("The embedded coordinator shows no pages; give it web_listen and call start().")
        scheme = "https" if self.config.web_tls else "http"
        return f"{scheme}://{ListenAddress(ListenAddress.parse(self.config.web_listen).host, self._server.web_port)}"

    @property
    def web_link(self) -> str:
        """Where a browser opens its pages, "" without `web_listen`; with the token in it, if one was made."""
        return "" if self._server is None else self._server.web_link

    @property
    def web_token(self) -> str | None:
        """What programs that read the pages send as a bearer token; None when it asks for none."""
        return None if self._server is None else self._server.web_token

    @property
    def token(self) -> str | None:
        """What members must know (HOROVOD_TOKEN); None when it asks for none."""
        return self.config.token

    def start(self) -> EmbeddedCoordinator:
        """Raises ValueError or OSError as CoordinatorServer.start does."""
        if self._thread is not None:
            raise _not_running("The embedded coordinator runs already.")
        shows_token = self._makes_token and ListenAddress.parse(self.config.listen).is_loopback()
        try:
            self._loop = asyncio.new_event_loop()
        except OSError as error:
            number = error.errno or errno.EMFILE
            sentence = f"The coordinator cannot be started: {reason_of(number)}."
            raise OSError(number, coded(EngineCode.TOO_MANY_OPEN_FILES, sentence)) from error
        quiet(self._loop)
        self._thread = threading.Thread(target=self._loop.run_forever, name="horovod-coordinator", daemon=True)
        self._thread.start()
        self._server = CoordinatorServer(dataclasses.replace(self.config, shows_token=shows_token))
        try:
            self._call(self._server.start(), START_TIMEOUT_S)
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

    def give_up(self, job: str, sentence: str) -> None:
        """For a launcher in this process, from any of its threads: a process of the job will not come to its world.

        Those that wait for it in hvd.init(), and those that call it later, get this sentence at once.
        """
        if self._thread is not None and self._server is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile, and nobody waits any more
                self._loop.call_soon_threadsafe(self._server.give_up, job, sentence)

    def end(self, job: str, cause: str) -> None:
        """For a launcher in this process, from any of its threads: nobody waits for the job any more.

        Its processes get the cause at once, in hvd.init() and in the operations of a world that stands.
        """
        if self._thread is not None and self._server is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # as above
                self._loop.call_soon_threadsafe(self._server.end, job, cause)

    def rank_ended(self, ended: RankEnded) -> None:
        """For a launcher in this process, from any of its threads: evidence for the world of the process."""
        if self._thread is not None and self._server is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # as above
                self._loop.call_soon_threadsafe(self._server.rank_ended, ended)

    def ask_to_leave(self, job: str, slot: int, incarnation: int, reason: str) -> None:
        """For a launcher in this process, from any of its threads: this process of an elastic job is to leave it at the
        next commit, for a launcher that can send it no signal. Nothing happens where it is in no world.
        """
        if self._thread is not None and self._server is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._server.ask_to_leave, job, slot, incarnation, reason)

    def stop(self, grace: float = STOP_GRACE_S) -> None:
        """Idempotent."""
        if self._thread is None or self._server is None:
            return
        try:
            self._call(self._server.stop(grace), grace + START_TIMEOUT_S)
        finally:
            self._end_thread()

    def __enter__(self) -> EmbeddedCoordinator:
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


def _not_running(sentence: str) -> RuntimeError:
    return RuntimeError(coded(ClusterCode.NOT_RUNNING, sentence))
