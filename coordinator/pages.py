"""The pages of a coordinator, on a port of its own (`--web-listen`): / for people, /metrics for Prometheus, /healthz
and /readyz for probes.

healthz says that the process runs and its event loop turns; readyz that its store answers and takes writes, too; else
why not. One that is not ready still serves the worlds it has: restart it for healthz, and send new jobs elsewhere for
readyz.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from http import HTTPStatus

from horovod.base.errors import ClusterCode, code_of, coded, coded_like, without_code
from horovod.base.telemetry import Registry
from horovod.base.telemetry.http import Answer, WebServer
from horovod.base.telemetry.metrics import CONTENT_TYPE, text_of
from horovod.base.words import plural, printable

from .core.world.membership import JobOverview
from .store import Store, StoreError, WritesRefusedError

ANSWER_S = 2.0  # a store that takes longer does not answer
KEEP_S = 1.0
NO_ANSWER = coded(ClusterCode.STORE_FAILED, "The store does not answer.")
# The test write names a revision that nothing has, so it never happens; a store that takes no writes refuses it all the
# same.
_KEY = "ready"
_NO_REVISION = (1 << 62) - 1


_log = logging.getLogger(__name__)


class Readiness:
    """`await readiness()` is the sentence why this coordinator can't serve; "" when it can."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asked_at_s = -KEEP_S
        self._last = ""
        self._asking = asyncio.Lock()

    async def __call__(self) -> str:
        async with self._asking:
            if time.monotonic() - self._asked_at_s >= KEEP_S:
                try:
                    await asyncio.wait_for(self._store.put_if(_KEY, b"", _NO_REVISION), ANSWER_S)
                    self._last = ""
                except WritesRefusedError as error:
                    if self._last != str(error):
                        self._last = str(error)
                        _log.warning("This coordinator is not ready: %s", error)
                except (StoreError, asyncio.TimeoutError):
                    self._last = NO_ANSWER
                self._asked_at_s = time.monotonic()
            return self._last


# The status page: jobs, their worlds, who is in them and what they wait for. Pure: values in, HTML out.
#
# Everything that came from outside (names of jobs and hosts, sentences that quote them) is escaped. The page has no
# script and loads nothing.

MOST_MEMBERS = 512  # members of one job that the page shows; a page is for reading
MOST_ENTRIES = 12  # entries of a job's story that the page shows

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>horovod coordinator</title><meta http-equiv="refresh" content="5">
<style>body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.2em .6em;border-bottom:1px solid #ccc}
.bad{color:#a00}</style></head><body>
"""


def page_of(jobs: Iterable[JobOverview], listening: str, obstacle: str) -> str:
    jobs = sorted(jobs, key=lambda job: job.name)
    state = (
        f'<b class="bad">{_text(coded_like(obstacle, without_code(obstacle).rstrip(".")))}</b>'
        if obstacle
        else "its store answers"
    )
    parts = [
        _HEAD,
        "<h1>horovod coordinator</h1>\n",
        f"<p>{_text(listening)}; {state}; {plural(len(jobs), 'job')}.</p>\n",
    ]
    parts += [_job(job) for job in jobs]
    parts.append('<p><a href="/metrics">metrics</a></p>\n</body></html>\n')
    return "".join(parts)


def _job(job: JobOverview) -> str:
    world = f"world {job.epoch}, {len(job.members)} of {job.size} members" if job.epoch else "no world"
    parts = [f"<h2>{_text(job.name)}</h2>\n<p>{world}; {job.waiting} waiting.</p>\n"]
    if job.waits_for:
        parts.append(f"<p>{_text(job.waits_for)}</p>\n")
    if job.members:
        shown = sorted(job.members, key=lambda member: member.rank)[:MOST_MEMBERS]
        parts.append(_row("th", ["rank", "host", "pid", "", "operations", "bytes", "waited (s)"], "<table>\n"))
        for member in shown:
            report = job.reports.get(member.rank)
            figures = [f"{report.operations:,}", f"{report.bytes:,}", f"{report.waited_us / 1e6:.1f}"] if report else []
            away = "away" if member.away else ""
            parts.append(_row("td", [str(member.rank), member.host, str(member.pid), away, *figures]))
        parts.append("</table>\n")
        if len(shown) < len(job.members):
            parts.append(f"<p>and {len(job.members) - len(shown)} more</p>\n")
    if job.story:
        parts.append("<p>What has happened, the latest first (UTC):</p>\n<ul>\n")
        for entry in reversed(job.story[-MOST_ENTRIES:]):
            parts.append(f"<li>{_time(entry.at)} {_text(entry.sentence)}</li>\n")
        parts.append("</ul>\n")
    return "".join(parts)


def _time(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_s))


def _row(cell: str, values: Sequence[str], before: str = "") -> str:
    return f"{before}<tr>{''.join(f'<{cell}>{_text(value)}</{cell}>' for value in values)}</tr>\n"


def _text(text: str) -> str:
    return escape(printable(text))


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
