"""The metrics of one process: counters, gauges and histograms by name and labels. No I/O, no clock, no global.

    registry = Registry()
    plans = registry.counter("horovod_plans_total", "Operations that got an id", labels=("job",))
    plans.add(3, "digits")
    registry.gauge("horovod_worlds", "Worlds that run", read=lambda: {(): len(worlds)})

Counters are written where something happens; gauges are read when somebody asks, so that what exists already (worlds,
members) is not kept twice. A label's values come from outside (names of jobs), so each family holds at most MAX_SERIES
series: what comes beyond is counted under the label values "(other)", and nobody can fill the memory with names.

Used from any thread: each family has a lock, held for the time of an addition.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]
FamilyType = TypeVar("FamilyType", bound="Family")

MAX_SERIES = 20_000
OTHER = "(other)"
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # bounds of a latency


@dataclass(frozen=True)
class Distribution:
    """How many observations were at most each bound; the last count is of all others."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True)
class Sample:
    labels: Labels  # values of the labels, in the order of the family's names
    value: float | Distribution


class Family:
    """One metric with all its series. `name` and `labels` are Prometheus's; a counter's name ends in _total."""

    kind: Kind

    def __init__(self, name: str, help: str, labels: Labels) -> None:  # noqa: A002
        self.name, self.help, self.labels = name, help, labels
        self._lock = threading.Lock()

    def samples(self) -> Sequence[Sample]:
        raise NotImplementedError

    def _key(self, values: Labels, known: Mapping[Labels, object]) -> Labels:
        if len(values) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not {len(values)} of them.")
        return values if values in known or len(known) < MAX_SERIES else (OTHER,) * len(values)


class Counter(Family):
    kind = "counter"

    def __init__(self, name: str, help: str, labels: Labels) -> None:  # noqa: A002
        super().__init__(name, help, labels)
        self._values: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, amount: float = 1, *values: str) -> None:
        with self._lock:
            key = self._key(values, self._values)
            self._values[key] = self._values.get(key, 0.0) + amount

    def samples(self) -> Sequence[Sample]:
        with self._lock:
            return [Sample(labels, value) for labels, value in self._values.items()]


class Gauge(Family):
    """Read, not kept. kind "counter" is for totals that somebody else keeps (an engine's counters)."""

    def __init__(
        self,
        name: str,
        help: str,  # noqa: A002
        labels: Labels,
        read: Callable[[], Mapping[Labels, float]],
        kind: Kind = "gauge",
    ) -> None:
        super().__init__(name, help, labels)
        self.kind = kind
        self._read = read

    def samples(self) -> Sequence[Sample]:
        samples = [Sample(labels, value) for labels, value in self._read().items()]
        return samples[:MAX_SERIES]


class Histogram(Family):
    kind = "histogram"

    def __init__(self, name: str, help: str, labels: Labels, bounds: Sequence[float]) -> None:  # noqa: A002
        super().__init__(name, help, labels)
        self.bounds = tuple(sorted(bounds))
        self._counts: dict[Labels, list[int]] = {}
        self._totals: dict[Labels, float] = {}

    def observe(self, value: float, *values: str) -> None:
        with self._lock:
            key = self._key(values, self._counts)
            counts = self._counts.setdefault(key, [0] * (len(self.bounds) + 1))
            counts[bisect_left(self.bounds, value)] += 1
            self._totals[key] = self._totals.get(key, 0.0) + value

    def samples(self) -> Sequence[Sample]:
        with self._lock:
            return [
                Sample(labels, Distribution(self.bounds, tuple(counts), self._totals[labels]))
                for labels, counts in self._counts.items()
            ]


class Registry:
    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def __iter__(self) -> Iterator[Family]:
        return iter(list(self._families.values()))

    def counter(self, name: str, help: str, labels: Labels = ()) -> Counter:  # noqa: A002
        return self._add(Counter(name, help, labels))

    def gauge(
        self,
        name: str,
        help: str,  # noqa: A002
        read: Callable[[], Mapping[Labels, float]],
        labels: Labels = (),
        kind: Kind = "gauge",
    ) -> Gauge:
        """read: called by whoever collects, in its thread."""
        return self._add(Gauge(name, help, labels, read, kind))

    def histogram(
        self,
        name: str,
        help: str,  # noqa: A002
        labels: Labels = (),
        bounds: Sequence[float] = SECONDS,
    ) -> Histogram:
        return self._add(Histogram(name, help, labels, bounds))

    def _add(self, family: FamilyType) -> FamilyType:
        if family.name in self._families:
            raise ValueError(f"There is a metric {family.name!r} already.")
        self._families[family.name] = family
        return family


# -- as Prometheus's text format, version 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats) ------------------
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def text_of(registry: Registry) -> str:
    return "".join(f"{line}\n" for line in _lines(registry))


def _lines(registry: Registry) -> Iterator[str]:
    for family in registry:
        yield f"# HELP {family.name} {_escaped(family.help)}"
        yield f"# TYPE {family.name} {family.kind}"
        for sample in family.samples():
            if isinstance(sample.value, Distribution):
                yield from _histogram(family.name, family.labels, sample.labels, sample.value)
            else:
                yield f"{family.name}{_braces(family.labels, sample.labels)} {_number(sample.value)}"


def _histogram(name: str, names: Labels, values: Labels, found: Distribution) -> Iterator[str]:
    below = 0
    for bound, count in zip((*found.bounds, math.inf), found.counts, strict=True):
        below += count
        yield f"{name}_bucket{_braces((*names, 'le'), (*values, _number(bound)))} {below}"
    yield f"{name}_sum{_braces(names, values)} {_number(found.total)}"
    yield f"{name}_count{_braces(names, values)} {found.count}"


def _braces(names: Labels, values: Labels) -> str:
    pairs = (f'{name}="{_escaped(value, quotes=True)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}" if names else ""


def _escaped(text: str, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    text = text.replace('"', r"\"") if quotes else text
    if text.isprintable():
        return text
    # Names of jobs come from outside, and a person may read this in a terminal.
    return "".join(one if one.isprintable() else _visible(one) for one in text)


def _visible(character: str) -> str:
    return character.encode("unicode_escape").decode().replace("\\", r"\\")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1 << 53 else repr(value)
