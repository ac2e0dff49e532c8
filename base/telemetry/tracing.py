"""Spans of one trace through several processes: horovodrun, coordinator, ranks.

    with span("horovod.join", job="digits"):     # a child of the span that is current here
        metadata = headers()                     # what a gRPC call carries, so that the other side's span is a child

What is current travels in W3C's form (w3.org/TR/trace-context): as the variable TRACEPARENT to child processes, as the
metadata key `traceparent` with calls. Without a tracer (otel.py installs one where OTEL_* asks for it) spans are empty
and cost nothing, but a context that came from outside is passed on all the same.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

VARIABLE = "TRACEPARENT"
METADATA_KEY = "traceparent"
_FORM = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

Value = str | int | float | bool


class Span(Protocol):
    traceparent: str  # "" if nothing is traced

    def set(self, **attributes: Value) -> None: ...

    def end(self, error: str = "") -> None:
        """Idempotent. error: why what it stands for failed."""


class Tracer(Protocol):
    def begin(self, name: str, parent: str, attributes: Mapping[str, Value]) -> Span:
        """parent: a traceparent, or "" for the first span of a trace."""


class NoSpan:
    """Passes its parent's context on."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    def set(self, **attributes: Value) -> None:
        pass

    def end(self, error: str = "") -> None:
        pass


_tracer: Tracer | None = None  # one tracer for the whole process, as for its logging
_current: ContextVar[str] = ContextVar("horovod_traceparent", default="")


def install(tracer: Tracer | None) -> None:
    global _tracer
    _tracer = tracer


def is_active() -> bool:
    return _tracer is not None


def current() -> str:
    """The traceparent that spans made here become children of: that of the span around, or TRACEPARENT's."""
    return _current.get() or checked(os.environ.get(VARIABLE, ""))


def checked(traceparent: str) -> str:
    """`traceparent`, which came from outside, or "" where it is none."""
    return traceparent if _FORM.fullmatch(traceparent) else ""


def begin(name: str, parent: str | None = None, **attributes: Value) -> Span:
    """A span that somebody ends later, perhaps in another thread. parent: None is what is current."""
    parent = current() if parent is None else parent
    return _tracer.begin(name, parent, attributes) if _tracer is not None else NoSpan(parent)


@contextlib.contextmanager
def span(name: str, **attributes: Value) -> Iterator[Span]:
    """Current inside; an exception is its error."""
    made = begin(name, None, **attributes)
    token = _current.set(made.traceparent)
    try:
        yield made
    except BaseException as error:
        made.end(f"{type(error).__name__}: {error}")
        raise
    finally:
        _current.reset(token)
        made.end()


def headers(traceparent: str | None = None) -> tuple[tuple[str, str], ...]:
    """Metadata for a gRPC call; empty where there is no trace."""
    found = current() if traceparent is None else traceparent
    return ((METADATA_KEY, found),) if found else ()


def from_metadata(metadata: Any) -> str:
    """The traceparent that a call brought, or ""."""
    given = dict(metadata or ()).get(METADATA_KEY, "")
    return checked(given) if isinstance(given, str) else ""
