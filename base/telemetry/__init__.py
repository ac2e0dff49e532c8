"""What coordinator, launcher and training processes tell of themselves: metrics, traces, structured logs.

A floor below `coordinator` and `worker`, which never import each other, beside `protos`; it knows neither of them
(docs/adr/0038-telemetry.md). Metrics are written once in a `Registry` (metrics.py) and read in two ways: as Prometheus
text and by OpenTelemetry (otel.py), whose packages are optional and imported where OTEL_* asks for them.
"""

from .metrics import Counter, Gauge, Histogram, Registry, Sample

__all__ = ["Counter", "Gauge", "Histogram", "Registry", "Sample"]
