"""A registry as Prometheus's text format, version 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .registry import Distribution, Labels, Registry

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
