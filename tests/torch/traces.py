"""Reads a timeline as a strict reader would: valid JSON, and in each process spans that nest and end."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Span:
    name: str
    start: float  # microseconds
    end: float = -1
    arguments: dict[str, str] = field(default_factory=dict)
    inner: list[Span] = field(default_factory=list)
    ticks: list[str] = field(default_factory=list)  # events without duration inside

    @property
    def activities(self) -> list[str]:
        return [span.name for span in self.inner]


@dataclass
class Trace:
    events: list[dict[str, Any]]
    spans: dict[str, list[Span]]  # by the name of the tensor

    def instants(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["ph"] == "i" and event["name"] == name]


def read(path: str | Path) -> Trace:
    events: list[dict[str, Any]] = json.loads(Path(path).read_text())
    assert [(event["name"], event["ph"], event["pid"]) for event in events[:2]] == [
        ("process_name", "M", 0),
        ("process_sort_index", "M", 0),
    ]
    assert events[0]["args"]["start_time_since_epoch_in_micros"] > 1_600_000_000_000_000
    names: dict[int, str] = {0: ""}
    spans: dict[str, list[Span]] = {}
    stacks: dict[int, list[Span]] = {}
    for event in events:
        assert "tid" not in event
        pid, phase = event["pid"], event["ph"]
        if phase == "M":
            if event["name"] == "process_name" and pid > 0:
                assert pid == len(names), "processes are numbered one after the other"
                names[pid] = event["args"]["name"]
                assert names[pid] not in spans, "each has a name of its own"
                spans[names[pid]], stacks[pid] = [], []
            continue
        if phase == "i":
            assert (pid, event["s"]) == (0, "g")
            continue
        stack = stacks[pid]
        if phase == "B":
            span = Span(event["name"], event["ts"])
            previous = (stack[-1].inner if stack else spans[names[pid]])[-1:]
            assert span.start >= max([one.end for one in previous], default=0)
            assert not stack or span.start >= stack[-1].start
            (stack[-1].inner if stack else spans[names[pid]]).append(span)
            stack.append(span)
        elif phase == "E":
            span = stack.pop()
            assert event["name"] == span.name
            span.end, span.arguments = event["ts"], event.get("args", {})
            assert span.end >= max([span.start, *(one.end for one in span.inner)])
        else:
            assert (phase, event["dur"]) == ("X", 0)
            assert event["ts"] >= stack[-1].start
            stack[-1].ticks.append(event["name"])
    assert not any(stacks.values()), "every span ends"
    return Trace(events, spans)
