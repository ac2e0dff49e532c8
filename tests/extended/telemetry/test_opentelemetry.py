"""Spans and metrics by OTLP, over gRPC and over HTTP, each received by a real server: one trace from horovodrun to the
first step, and what ranks do."""

from __future__ import annotations

import gzip
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from agents import Agents
from resources import eventually

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
LATE = """
import os, time, torch, horovod.torch as hvd
hvd.init()
is_over = torch.zeros(1)
while not is_over.item():
    if hvd.rank() == 1:
        time.sleep(0.02)
    is_over = hvd.allreduce(torch.tensor([float(os.path.exists({enough!r}))]), op=hvd.Min, name="enough")
hvd.shutdown()
"""
PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


def service_of(resource: Any) -> str:
    return next(one.value.string_value for one in resource.attributes if one.key == "service.name")


class Received:
    """What has come by now, over whichever protocol."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []  # service and span
        self.metrics: dict[str, Any] = {}  # another one for each request, so that a look sees those of one moment

    def take_traces(self, request: Any) -> Any:
        for group in request.resource_spans:
            for scope in group.scope_spans:
                self.spans += [(service_of(group.resource), span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def take_metrics(self, request: Any) -> Any:
        scopes = [scope for group in request.resource_metrics for scope in group.scope_metrics]
        self.metrics = {**self.metrics, **{metric.name: metric for scope in scopes for metric in scope.metrics}}
        return metrics_service_pb2.ExportMetricsServiceResponse()


class GrpcReceiver(Received):
    """Both services of OTLP/gRPC under their own names."""

    protocol = "grpc"

    def __init__(self) -> None:
        super().__init__()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(self), self._server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(self), self._server)
        self.address = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()


class Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._received.take_traces(request)


class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._received.take_metrics(request)


class HttpReceiver(Received):
    """OTLP/HTTP with binary protobuf: POST to /v1/traces and /v1/metrics, whatever else is an error."""

    protocol = "http/protobuf"

    def __init__(self) -> None:
        super().__init__()
        self.headers: list[str | None] = []  # of X-Tenant, by request
        received = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Content-Encoding"] == "gzip":
                    body = gzip.decompress(body)
                received.headers.append(self.headers["X-Tenant"])
                if self.headers["Content-Type"] != "application/x-protobuf":
                    self.send_error(415)
                    return
                if self.path == "/v1/traces":
                    answer = received.take_traces(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
                elif self.path == "/v1/metrics":
                    answer = received.take_metrics(metrics_service_pb2.ExportMetricsServiceRequest.FromString(body))
                else:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(answer.SerializeToString())

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(params=[GrpcReceiver, HttpReceiver], ids=["grpc", "http"])
def receiver(request: pytest.FixtureRequest) -> Iterator[GrpcReceiver | HttpReceiver]:
    if request.param is HttpReceiver:
        pytest.importorskip(
            "opentelemetry.exporter.otlp.proto.http", reason="needs opentelemetry-exporter-otlp-proto-http"
        )
    made = request.param()
    yield made
    made.stop()


def run(environ: Mapping[str, str], np: str = "2", *options: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "TRACEPARENT"))}
    launcher = os.path.join(os.path.dirname(sys.executable), "horovodrun")
    command = [launcher, "--start-timeout", "90", "-np", np, *options, sys.executable, "-c", SCRIPT]
    return subprocess.run(command, env={**own, **environ}, capture_output=True, text=True, timeout=100)


def test_one_trace_from_launcher_to_first_step(receiver: GrpcReceiver | HttpReceiver) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address, "TRACEPARENT": PARENT, "HOROVOD_REPORT_SECONDS": "0.05"}
    if isinstance(receiver, HttpReceiver):  # gRPC is what the SDK of Python does unless told otherwise
        environ |= {"OTEL_EXPORTER_OTLP_PROTOCOL": receiver.protocol, "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"}
        environ |= {"OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=one"}
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
    if isinstance(receiver, HttpReceiver):
        assert set(receiver.headers) == {"one"}


def test_a_rank_that_is_always_late_is_seen(tmp_path: Path) -> None:
    """Rank 1 comes a moment later to every step, so rank 0 waits for it."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs opentelemetry-exporter-otlp-proto-http")
    receiver, enough = HttpReceiver(), tmp_path / "enough"
    found: dict[str, dict[str, float]] = {}

    def is_seen() -> bool:
        metrics = receiver.metrics
        for name in ("operations_total", "bytes_total", "wait_seconds_total", "lateness_seconds"):
            metric = metrics.get(f"horovod_rank_{name}")
            points = () if metric is None else metric.sum.data_points or metric.gauge.data_points
            ranks = [{one.key: one.value.string_value for one in point.attributes}["rank"] for point in points]
            values = (getattr(point, point.WhichOneof("value")) for point in points)  # a double or an integer
            found[name] = dict(zip(ranks, values, strict=True))
        return min(found["operations_total"].values(), default=0) >= 20

    script = tmp_path / "late.py"
    script.write_text(LATE.format(enough=str(enough)))
    launcher = os.path.join(os.path.dirname(sys.executable), "horovodrun")
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "TRACEPARENT"))}
    own |= {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address, "OTEL_EXPORTER_OTLP_PROTOCOL": receiver.protocol}
    own |= {"OTEL_METRIC_EXPORT_INTERVAL": "100", "HOROVOD_REPORT_SECONDS": "0.05"}
    try:
        with subprocess.Popen(
            [launcher, "--start-timeout", "90", "-np", "2", sys.executable, str(script)], env=own
        ) as job:
            try:
                assert eventually(is_seen, 60), found
            finally:
                enough.touch()
                assert job.wait(60) == 0
    finally:
        receiver.stop()
    assert found["bytes_total"]["0"] >= 4 * 20
    assert found["wait_seconds_total"]["0"] > found["wait_seconds_total"]["1"]
    assert found["lateness_seconds"]["0"] == 0, "it waits most"
    difference = found["wait_seconds_total"]["0"] - found["wait_seconds_total"]["1"]
    # Metrics are read one after the other, so the next reports of the ranks may have come between these two.
    assert found["lateness_seconds"]["1"] == pytest.approx(difference, rel=0.5)


def test_a_job_on_registered_agents_is_traced_as_well(tmp_path: Path) -> None:
    """The coordinator is another process's, so its spans are the trace's only where it exports, too."""
    receiver = GrpcReceiver()
    try:
        with Agents(tmp_path) as agents:
            agents.add("h1", 2)
            environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address, "TRACEPARENT": PARENT}
            done = run({**environ, "HOROVOD_TOKEN": agents.coordinator.token or ""}, "2", *agents.options)
        assert done.returncode == 0, done.stderr
        assert {span.trace_id.hex() for _, span in receiver.spans} == {PARENT.split("-")[1]}
        (launcher,) = (span for service, span in receiver.spans if service == "horovodrun")
        assert launcher.name == "horovodrun"
        ranks = [span for _, span in receiver.spans if span.name == "horovod.init"]
        assert [span.parent_span_id for span in ranks] == [launcher.span_id] * 2
    finally:
        receiver.stop()


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
