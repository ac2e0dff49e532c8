"""The pages of a coordinator: / for people, /metrics for Prometheus, /healthz and /readyz for probes.

healthz says that the process runs and its event loop turns; readyz that its store answers and takes writes, too; else
why not. One that is not ready still serves the worlds it has: restart it for healthz, and send new jobs elsewhere for
readyz.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus

from horovod.base.errors import ClusterCode, code_of, coded
from horovod.base.telemetry import Registry
from horovod.base.telemetry.http import Answer, WebServer
from horovod.base.telemetry.prometheus import CONTENT_TYPE, text_of
from horovod.coordinator.core.world.overview import JobOverview

from .page import page_of
from .ready import NO_ANSWER

NO_WRITES = coded(ClusterCode.STORE_TAKES_NO_WRITES, "The store takes no writes; the status page and the log say why.")


@dataclass(frozen=True)
class Shown:
    """What the pages are made of."""

    overview: Callable[[], Iterable[JobOverview]]
    registry: Registry
    obstacle: Callable[[], Awaitable[str]]  # the sentence why this coordinator is not ready, or ""
    listening: str  # the address to which members connect


def web_server(shown: Shown, token: str | None, host_names: frozenset[str] | None = None) -> WebServer:
    """token: for / and /metrics; None: they are open. host_names: as for WebServer. Probes' pages always are."""

    async def status() -> Answer:
        page = page_of(shown.overview(), f"serves members at {shown.listening}", await shown.obstacle())
        return Answer(page, content_type="text/html; charset=utf-8")

    async def metrics() -> Answer:
        return Answer(text_of(shown.registry), content_type=CONTENT_TYPE)

    async def healthz() -> Answer:
        return Answer("ok\n")

    async def readyz() -> Answer:
        if obstacle := await shown.obstacle():  # the sentence names hosts and files, so it is not for everybody
            sentence = NO_WRITES if code_of(obstacle) is ClusterCode.STORE_TAKES_NO_WRITES else NO_ANSWER
            return Answer(f"{sentence}\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return Answer("ok\n")

    pages = {"/": status, "/metrics": metrics, "/healthz": healthz, "/readyz": readyz}
    return WebServer(pages, token, frozenset({"/healthz", "/readyz"}), host_names)
