"""Spans and metrics by OTLP, received by a real server of its services: one trace from horovodrun to the first step."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent import futures
from typing import Any

import grpc
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs opentelemetry-exporter-otlp-proto-grpc")
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

SCRIPT = """
import torch, horovod.torch as hvd
hvd.init()
for step in range(3):
    hvd.allreduce(torch.ones(4), name="w")
hvd.shutdown()
"""
PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


class Receiver:
    """Both services of OTLP/gRPC under their own names."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []  # service and span
        self.metrics: dict[str, Any] = {}
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(self), self.server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(self), self.server)
        self.address = f"http://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()


def service_of(resource: Any) -> str:
    return next(one.value.string_value for one in resource.attributes if one.key == "service.name")


class Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for group in request.resource_spans:
            for scope in group.scope_spans:
                self._receiver.spans += [(service_of(group.resource), span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for group in request.resource_metrics:
            for scope in group.scope_metrics:
                self._receiver.metrics.update({metric.name: metric for metric in scope.metrics})
        return metrics_service_pb2.ExportMetricsServiceResponse()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.server.stop(0).wait()


def run(environ: Mapping[str, str], np: str = "2") -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "TRACEPARENT"))}
    command = [os.path.join(os.path.dirname(sys.executable), "horovodrun"), "-np", np, sys.executable, "-c", SCRIPT]
    return subprocess.run(command, env={**own, **environ}, capture_output=True, text=True, timeout=100)


def test_one_trace_from_launcher_to_first_step(receiver: Receiver) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address, "TRACEPARENT": PARENT, "HOROVOD_REPORT_SECONDS": "0.05"}
    done = run(environ)
    assert done.returncode == 0, done.stderr
    assert {span.trace_id.hex() for _, span in receiver.spans} == {PARENT.split("-")[1]}, "it is the caller's trace"
    by_id = {span.span_id: span for _, span in receiver.spans}

    def path(span: Any) -> str:
        parent = by_id.get(span.parent_span_id)
        return f"{path(parent)} > {span.name}" if parent is not None else span.name

    found = sorted((service, path(span)) for service, span in receiver.spans)
    join = "horovodrun > horovod.init > horovod.join"
    step = "horovodrun > horovod.init > horovod.first_step"
    expected = [
        ("horovodrun", "horovodrun"),
        *[("horovodrun", f"{join} > horovod.coordinator.join")] * 2,
        *[("horovodrun", f"{join} > horovod.coordinator.negotiation")] * 2,
        *[("horovod-rank", "horovodrun > horovod.init")] * 2,
        *[("horovod-rank", join)] * 2,
        *[("horovod-rank", step)] * 2,
        *[("horovod-rank", f"{step} > horovod.negotiation")] * 2,
    ]
    assert found == sorted(expected)
    assert [span.name for _, span in receiver.spans if span.status.message] == []
    (formed,) = receiver.metrics["horovod_worlds_formed_total"].sum.data_points
    assert formed.as_double == 1
    assert {one.key: one.value.string_value for one in formed.attributes} == {"job": "default"}
    store = receiver.metrics["horovod_store_seconds"].histogram.data_points
    assert sum(point.count for point in store) >= 4
    assert all(sum(point.bucket_counts) == point.count for point in store)


def test_a_receiver_that_is_not_there_ends_nothing() -> None:
    done = run({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("environ", "is_imported"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "mine"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
    ],
)
def test_nothing_is_imported_unless_it_is_asked_for(environ: dict[str, str], is_imported: bool) -> None:
    script = "import sys; from horovod.common import basics as hvd; hvd.init(); print('opentelemetry' in sys.modules)"
    own = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**own, **environ}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [str(is_imported)], done.stderr
    assert ("horovod.init" in done.stderr) == is_imported
