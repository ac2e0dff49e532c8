"""OpenTelemetry: spans and a registry's metrics by OTLP, where the standard OTEL_* variables ask for it.

    OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4317 horovodrun -np 2 python train.py

Nothing of OpenTelemetry is imported otherwise. Its packages are the extra `horovod[otel]`; where they are asked for and
not there, one warning says so. Metrics are built from the registry as OTLP's own data points, histograms included, and
handed to the exporter; no instrument of the SDK stands between. A program that has a tracer provider of its own gets
our spans there. Exporters never delay a program for longer than END_S at its end, whether anybody listens or not.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from . import tracing
from .metrics import Distribution, Family, Registry, Sample
from .tracing import Value

END_S = 3.0
MOST_INTERVAL_S = 60.0  # the standard's default
_SCOPE = "horovod"

log = logging.getLogger(__name__)


def is_asked_for(signal: str, environ: Mapping[str, str] = os.environ) -> bool:
    """signal: "traces" or "metrics"."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if exporter := environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip():
        return exporter != "none"
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    return any(environ.get(name, "").strip() for name in names)


def start(service: str, registry: Registry | None = None, **resource: Value) -> Callable[[], None]:
    """Begins to export what the environment asks for, and returns what ends that. Never raises.

    service: the name of the service, unless OTEL_SERVICE_NAME says another one. registry: its metrics are exported.
    """
    traces, metrics = is_asked_for("traces"), registry is not None and is_asked_for("metrics")
    if not traces and not metrics:
        return lambda: None
    ends: list[Callable[[], None]] = []
    try:
        if traces:
            ends.append(_start_traces(service, resource))
        if metrics and registry is not None:
            ends.append(_start_metrics(registry, service, resource))
    except ImportError as error:
        log.warning("OTEL_* asks for OpenTelemetry, which is not installed (%s): pip install 'horovod[otel]'.", error)
    except Exception as error:  # the endpoint can't be used, or the exporter is unknown
        log.warning("OpenTelemetry can't be used as OTEL_* asks for: %s", error)

    def end() -> None:
        tracing.install(None)
        # An exporter whose receiver is gone tries for long; the program does not wait for that.
        threads = [threading.Thread(target=one, name="horovod-otel-end", daemon=True) for one in ends]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + END_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    return end


def _resource(service: str, more: Mapping[str, Value]) -> Any:
    from opentelemetry.sdk.resources import Resource

    own: dict[str, Any] = dict(more)
    if "OTEL_SERVICE_NAME" not in os.environ and "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        own["service.name"] = service
    return Resource.create(own)


def _exporter(signal: str) -> Any:
    """What OTEL_TRACES_EXPORTER and its sister name: otlp (the default) or console."""
    name = os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip() or "otlp"
    if name == "console":
        from opentelemetry.sdk.metrics.export import ConsoleMetricExporter
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr) if signal == "traces" else ConsoleMetricExporter(out=sys.stderr)
    if name != "otlp":
        raise ValueError(f"OTEL_{signal.upper()}_EXPORTER={name} is not known here; expected otlp, console or none.")
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "")
    protocol = (own or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")).strip() or "grpc"
    if protocol == "grpc":
        if signal == "traces":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            return OTLPSpanExporter()
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

        return OTLPMetricExporter()
    if signal == "traces":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter

        return HttpSpanExporter()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetricExporter

    return HttpMetricExporter()


# -- traces ------------------------------------------------------------------------------------------------------------


def _start_traces(service: str, resource: Mapping[str, Value]) -> Callable[[], None]:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):  # the program's own provider, which ends with the program
        tracing.install(_Tracer(provider.get_tracer(_SCOPE)))
        return lambda: None
    own = TracerProvider(resource=_resource(service, resource), shutdown_on_exit=False)
    own.add_span_processor(BatchSpanProcessor(_exporter("traces")))
    tracing.install(_Tracer(own.get_tracer(_SCOPE)))
    shutdown: Callable[[], None] = own.shutdown
    return shutdown


class _Tracer:
    def __init__(self, tracer: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, parent: str, attributes: Mapping[str, Value]) -> tracing.Span:
        # Without a parent from Horovod, the span gets the program's parent, if it has one.
        context = self._propagator.extract({"traceparent": parent}) if parent else None
        named = {f"horovod.{key}": value for key, value in attributes.items()}
        return _Span(self._tracer.start_span(name, context, attributes=named))


class _Span:
    def __init__(self, span: Any) -> None:
        context = span.get_span_context()
        self._span = span
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes({f"horovod.{key}": value for key, value in attributes.items()})

    def end(self, error: str = "") -> None:
        from opentelemetry.trace import Status, StatusCode

        if not self._span.is_recording():
            return
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


# -- metrics -----------------------------------------------------------------------------------------------------------


def _start_metrics(registry: Registry, service: str, resource: Mapping[str, Value]) -> Callable[[], None]:
    exporter = _exporter("metrics")
    interval_s = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", MOST_INTERVAL_S * 1000)) / 1000
    about = _resource(service, resource)
    started_ns = time.time_ns()
    over = threading.Event()

    def run() -> None:
        last = False
        while not last:
            last = over.wait(interval_s)  # the state at the end is exported too
            try:
                exporter.export(_data(registry, about, started_ns))
            except Exception:
                log.warning("Metrics could not be exported.", exc_info=True)
        exporter.shutdown()

    thread = threading.Thread(target=run, name="horovod-otel-metrics", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return end


def _data(registry: Registry, resource: Any, started_ns: int) -> Any:
    """The registry as OTLP's data points, cumulative since `started_ns`."""
    from opentelemetry.sdk.metrics.export import Metric, MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    now_ns = time.time_ns()
    found = [(family, _points(family, started_ns, now_ns)) for family in registry]
    metrics = [Metric(family.name, family.help, "", data) for family, data in found if data is not None]
    scope = ScopeMetrics(scope=InstrumentationScope(_SCOPE), metrics=metrics, schema_url="")
    return MetricsData([ResourceMetrics(resource=resource, scope_metrics=[scope], schema_url="")])


def _points(family: Family, started_ns: int, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Histogram, Sum

    points = [_point(family, sample, started_ns, now_ns) for sample in family.samples()]
    if not points:
        return None
    if family.kind == "gauge":
        return Gauge(points)
    if family.kind == "counter":
        return Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    return Histogram(points, AggregationTemporality.CUMULATIVE)


def _point(family: Family, sample: Sample, started_ns: int, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint, NumberDataPoint

    attributes = dict(zip(family.labels, sample.labels, strict=True))
    if not isinstance(sample.value, Distribution):
        return NumberDataPoint(attributes, started_ns, now_ns, sample.value)
    found = sample.value
    return HistogramDataPoint(
        attributes, started_ns, now_ns, found.count, found.total, found.counts, found.bounds, min=0.0, max=0.0
    )
