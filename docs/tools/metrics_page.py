"""docs/metrics.md, made from coordinator/metrics.py: `python docs/tools/metrics_page.py > docs/metrics.md`."""

from __future__ import annotations

from horovod.coordinator.metrics import CoordinatorMetrics

_BEGIN = """# Metrics

This page is made from `coordinator/metrics.py` by `python docs/tools/metrics_page.py > docs/metrics.md`.

A coordinator shows these at `/metrics` and exports them with OpenTelemetry ([observability](observability.md)).

| name | kind | labels | is |
|---|---|---|---|
"""


def markdown() -> str:
    """The page."""
    rows = [
        f"| `{one.name}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels)} | {one.help} |\n"
        for one in CoordinatorMetrics(lambda: ()).registry
    ]
    return _BEGIN + "".join(rows)


if __name__ == "__main__":
    print(markdown(), end="")
