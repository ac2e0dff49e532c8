"""What can be seen of a job that this launcher started: the pages of its coordinator, and one trace of the whole."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TypedDict

from horovod.base.settings import Settings
from horovod.base.telemetry import Registry, otel, tracing
from horovod.base.tokens import read_token
from horovod.coordinator.server import EmbeddedCoordinator


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
