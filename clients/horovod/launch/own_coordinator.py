"""The launcher's own coordinator: its pages, the trace of its job, and one for processes that something else places.

Ray and Spark place processes. The coordinator of such a job lives in the driver, while the processes are there, and
knows their hosts by names that no two of them share.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypedDict

from horovod.base.addresses import loopback_listen
from horovod.base.run_certificate import SERVER_NAME, UnnamedCertificate, unnamed_certificate
from horovod.base.setting import split_ports
from horovod.base.settings import Settings
from horovod.base.telemetry import Registry, otel, tracing
from horovod.base.tokens import read_token
from horovod.coordinator.address import ListenAddress, everywhere
from horovod.coordinator.config import Limits
from horovod.coordinator.core.ending import RankEnded
from horovod.coordinator.in_process import InProcessScheduler
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.services.exchange import Service
from horovod.coordinator.tls import ServerTls
from horovod.protos.v1.story_pb2 import StoryEntry
from horovod.worker.runtime.host import choose_interfaces, interfaces

_SHORTEST = 4  # digits of a host's id that follow its name
_ADVICE = (
    "Install the program openssl or the package cryptography on the driver's host: each job then gets its own "
    "certificate."
)


class OwnCoordinator:
    """Serves from the beginning; `stop` ends it.

    It has a token of its own. Where processes are on other hosts it has a certificate of its own too. Both come to them
    by whatever places them: who may see what that sends may see them.
    """

    def __init__(
        self,
        settings: Settings,
        reached_at: str | None,
        nics: Iterable[str] = (),
        with_tls: bool = True,
        services: Sequence[Service] = (),
    ) -> None:
        """reached_at: the address of this host for processes on other ones, unless `nics` names interfaces. None: all
        processes are on this host, so that nobody else need connect, and TLS is not needed. with_tls: whether members
        can be given a certificate. services: what else is served here.
        """
        one_node = reached_at is None
        self.certificate = ""  # the certificate by which members know the coordinator, in PEM
        self.server_name: str | None = None
        self._made: UnnamedCertificate | None = None
        listen = loopback_listen() if one_node else everywhere(split_ports(settings.ports or ""))
        limits = Limits(settings.keepalive_timeout_seconds, settings.reattach_grace_seconds)
        here = "" if reached_at is None else _address_of(nics) or reached_at
        try:
            tls = self._tls() if with_tls and not one_node else None
            self._running = EmbeddedCoordinator(
                listen,
                secrets.token_urlsafe(32),
                tls=tls,
                tls_advice=_ADVICE,
                limits=limits,
                services=services,
                **pages_of(settings),
            ).start()
        except BaseException:
            self._close_files()
            raise
        tell_pages(self._running)
        self.token = self._running.token
        self.address = self._running.address
        if not one_node:
            self.address = str(ListenAddress(here, ListenAddress.parse(self.address).port))

    def give_up(self, job: str, sentence: str) -> None:
        """As EmbeddedCoordinator.give_up."""
        self._running.give_up(job, sentence)

    def end(self, job: str, cause: str) -> None:
        """As EmbeddedCoordinator.end."""
        self._running.end(job, cause)

    def rank_ended(self, ended: RankEnded) -> None:
        """As EmbeddedCoordinator.rank_ended."""
        self._running.rank_ended(ended)

    def story(self, job: str) -> Sequence[StoryEntry]:
        """The events of the job, the oldest first."""
        return self._running.server.story(job) if self._running.server is not None else ()

    def latest_epoch(self, job: str) -> int | None:
        """As `Membership.latest_epoch`. In the coordinator's event loop."""
        return self._running.server.latest_epoch(job) if self._running.server is not None else None

    def ask_to_leave(self, job: str, slot: int, incarnation: int, reason: str) -> None:
        """As EmbeddedCoordinator.ask_to_leave."""
        self._running.ask_to_leave(job, slot, incarnation, reason)

    def scheduler(self) -> InProcessScheduler:
        """As EmbeddedCoordinator.scheduler."""
        return self._running.scheduler()

    def members(self, job: str) -> set[tuple[str, int]]:
        """The hosts and process ids of the members of the job's world. Any thread."""
        server = self._running.server
        worlds = server.overview() if server is not None else []
        return {(one.host, one.pid) for world in worlds if world.name == job for one in world.members}

    def stop(self) -> None:
        """Idempotent."""
        self._running.stop(grace=0)
        self._close_files()

    def _tls(self) -> ServerTls | None:
        if (made := unnamed_certificate()) is None:
            return None
        self._made = made
        self.certificate, self.server_name = made.text, SERVER_NAME
        return ServerTls(made.cert, made.key)

    def _close_files(self) -> None:
        if self._made is not None:
            self._made.close()


def _address_of(nics: Iterable[str]) -> str:
    names = list(nics)
    return choose_interfaces(interfaces(), names)[0].addresses[0] if names else ""


class Pages(TypedDict):
    """Fields of CoordinatorConfig."""

    web_listen: str | None
    web_token: str | None


def pages_of(settings: Settings) -> Pages:
    """Raises OSError, with a sentence, when the file of the token can't be used."""
    token = read_token(settings.web_token_file) if settings.web_listen and settings.web_token_file else None
    return {"web_listen": settings.web_listen, "web_token": token}


def tell_pages(coordinator: EmbeddedCoordinator) -> None:
    """Says on stderr where its pages are, if it has any: the link may have a token in it that nobody else knows."""
    if coordinator.web_link:
        print(f"Horovod shows the state of the job at {coordinator.web_link}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def traced(ranks: int, registry: Registry | None = None) -> Iterator[dict[str, str]]:
    """A span for the whole job, where OTEL_* asks for one, and the variables that make the ranks' spans parts of it.

    registry: of the launcher's own coordinator, whose metrics are exported then.
    """
    end = otel.start("horovodrun", registry)
    try:
        with tracing.span("horovodrun", ranks=ranks) as span:
            yield {tracing.VARIABLE: span.traceparent} if span.traceparent else {}
    finally:
        end()


def host_names(nodes: Sequence[tuple[str, str]]) -> dict[str, str]:
    """A name for each id, of pairs of id and name of the host: that name where no other id has it.

    >>> host_names([("aaaa11", "gpu-1"), ("bbbb22", "gpu-2"), ("cccc33", "gpu-2")])
    {'aaaa11': 'gpu-1', 'bbbb22': 'gpu-2-bbbb', 'cccc33': 'gpu-2-cccc'}
    """
    hosts = dict(nodes)
    names = {}
    for node, host in hosts.items():
        others = [other for other, its_host in hosts.items() if its_host == host and other != node]
        length = _SHORTEST
        while any(other[:length] == node[:length] for other in others):
            length += 1
        names[node] = f"{host}-{node[:length]}" if others else host
    return names


class HostNames:
    """The same for hosts that come one after the other: each keeps the name that it has got, and no other gets it."""

    def __init__(self) -> None:
        self._hosts: dict[str, str] = {}  # id of a host -> its name, for all hosts that have come
        self._names: dict[str, str] = {}

    def given(self, nodes: Sequence[tuple[str, str]]) -> dict[str, str]:
        """Of these, and of all that came before.

        >>> names = HostNames()
        >>> names.given([("aaaa11", "gpu-1")])
        {'aaaa11': 'gpu-1'}
        >>> names.given([("bbbb22", "gpu-1")])
        {'aaaa11': 'gpu-1', 'bbbb22': 'gpu-1-bbbb'}
        """
        self._hosts |= dict(nodes)
        for node, name in host_names(list(self._hosts.items())).items():
            self._names.setdefault(node, name)
        return self._names
