"""The status page: jobs, their worlds, who is in them and what they wait for. Pure: values in, HTML out.

Everything that came from outside (names of jobs and hosts, sentences that quote them) is escaped. The page has no
script and loads nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape

from horovod.base.errors import coded_like, without_code
from horovod.base.words import plural, printable
from horovod.coordinator.core.world.overview import JobOverview

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
    world = f"epoch {job.epoch}, {len(job.members)} of {job.size} members" if job.epoch else "no world"
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
