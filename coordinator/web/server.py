"""The pages of a coordinator: / for people, /metrics for Prometheus, /healthz and /readyz for probes.

healthz says that the process runs and its event loop turns; readyz that its store answers too. One that is not ready
still serves the worlds it has: restart it for healthz, and send new jobs elsewhere for readyz.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus

from horovod.coordinator.core.overview import JobOverview
from horovod.telemetry import Registry
from horovod.telemetry.http import Answer, WebServer
from horovod.telemetry.prometheus import CONTENT_TYPE, text_of

from .page import page_of


@dataclass(frozen=True)
class Shown:
    """What the pages are made of."""

    overview: Callable[[], Iterable[JobOverview]]
    registry: Registry
    is_ready: Callable[[], Awaitable[bool]]
    listening: str  # where members connect


def web_server(shown: Shown, token: str | None) -> WebServer:
    """token: for / and /metrics, as a bearer token; None: they are open. The probes' pages always are."""

    async def status() -> Answer:
        page = page_of(shown.overview(), f"serves members at {shown.listening}", await shown.is_ready())
        return Answer(page, content_type="text/html; charset=utf-8")

    async def metrics() -> Answer:
        return Answer(text_of(shown.registry), content_type=CONTENT_TYPE)

    async def healthz() -> Answer:
        return Answer("ok\n")

    async def readyz() -> Answer:
        if await shown.is_ready():
            return Answer("ok\n")
        return Answer("the store does not answer\n", HTTPStatus.SERVICE_UNAVAILABLE)

    pages = {"/": status, "/metrics": metrics, "/healthz": healthz, "/readyz": readyz}
    return WebServer(pages, token, frozenset({"/healthz", "/readyz"}))
