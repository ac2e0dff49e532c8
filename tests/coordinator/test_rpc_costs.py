"""What one call of each RPC costs a coordinator: without a token, with the token of a job, with that of the cluster.

Each field of each request is filled in turn (the descriptors name them), behind what makes the request good, so that
the field is looked at. An RPC without an entry in TARGETS fails a test: say there how a good request begins. Costs are
counted, never timed: calls of Python's functions in the coordinator's event loop, and bytes that it keeps afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import pytest
import tiers
from coordinator_builders import request
from coordinator_client import bearer
from fuzzing import fields, fill
from google.protobuf.message import Message

from horovod import __version__, protos
from horovod.base.proofs import job_token
from horovod.base.protocol import PROTOCOL_VERSION
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.services.auth import OF_ONE_JOB
from horovod.protos.v1 import agents_pb2, jobs_pb2, membership_pb2, negotiation_pb2

CLUSTER = "0123456789abcdef0123456789abcdef"
LARGE_BYTES = 64 << 10  # of a field
MOST_CALLS = 30_000  # of Python's functions for one request: about 5 ms
CLUSTER_CALLS = 240_000  # with the token of the cluster, whose agents and jobs are looked at together
REFUSED_CALLS = 2_000  # for one that has no business there; it is not even read
BAD = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED)
KEPT_BYTES = 1 << 20  # after all requests of a test, which have some MB together

# RPC -> how a good request begins. What is kept for a holder of the cluster's token (jobs) has limits of its own.
TARGETS: dict[str, Message] = {
    "Membership/Join": membership_pb2.MemberMessage(join=request("m", job="j", size=2)),
    "Membership/Serves": membership_pb2.ServesRequest(job="j"),
    "Membership/Attendance": membership_pb2.AttendanceRequest(job="j"),
    "Negotiation/Negotiate": negotiation_pb2.NegotiationMessage(
        epoch=1, hello=negotiation_pb2.Hello(job="j", member_id="m")
    ),
    "Agents/Attach": agents_pb2.AgentMessage(
        register=agents_pb2.Register(
            protocol_version=PROTOCOL_VERSION, version=__version__, name="h", instance="i", slots=1
        )
    ),
    "Agents/GetCode": agents_pb2.GetCodeRequest(),
    "Agents/Connected": agents_pb2.ConnectedRequest(),
    "Jobs/Submit": jobs_pb2.JobSpec(command=["true"], processes=1),
    "Jobs/Follow": jobs_pb2.FollowMessage(open=jobs_pb2.Open(job="j")),
    "Jobs/List": jobs_pb2.ListRequest(most=1),
    "Jobs/Signal": jobs_pb2.SignalRequest(job="j", signal=15),
    "Jobs/Place": jobs_pb2.JobSpec(command=["true"], processes=1),
    "Jobs/FindCode": jobs_pb2.Code(sha256="0" * 64, size=1),
    "Jobs/PutCode": jobs_pb2.CodeChunk(code=jobs_pb2.Code(sha256="0" * 64, size=1), data=b"x"),
}


def rpcs() -> dict[str, Any]:
    """All that the protocol has, by name as in TARGETS: their descriptors."""
    found = {}
    for file in sorted(Path(next(iter(protos.__path__))).glob("v1/*_pb2.py")):
        module = importlib.import_module(f"horovod.protos.v1.{file.stem}")
        for service in module.DESCRIPTOR.services_by_name.values():
            found |= {f"{service.name}/{method.name}": method for method in service.methods}
    return found


class Meter:
    """A coordinator, and how many functions its event loop has called."""

    def __init__(self) -> None:
        self.calls = 0
        threading.setprofile(self._heard)
        try:
            self.coordinator = EmbeddedCoordinator(token=CLUSTER)
            self.coordinator.start()
        finally:
            threading.setprofile(None)

    def _heard(self, frame: FrameType, event: str, argument: object) -> None:
        if threading.current_thread().name != "horovod-coordinator":
            sys.setprofile(None)  # of this thread
        elif event in ("call", "c_call"):
            self.calls += 1

    def of(self, work: Callable[[], grpc.StatusCode]) -> tuple[grpc.StatusCode, int]:
        before = self.calls
        return work(), self.calls - before


@pytest.fixture(scope="module")
def meter() -> Iterator[Meter]:
    running = Meter()
    yield running
    running.coordinator.stop()


def requests(rpc: str) -> Iterator[tuple[str, bytes]]:
    """The good one, and one for each field that can be large."""
    good = TARGETS[rpc]
    yield "nothing", good.SerializeToString()
    for path in fields(good.DESCRIPTOR):
        message = type(good)()
        message.CopyFrom(good)
        fill(message, path, LARGE_BYTES, distinct=True)
        yield ".".join(path), message.SerializeToString()


def call(meter: Meter, method: Any, data: bytes, token: str | None) -> grpc.StatusCode:
    """How the call ends. A stream is ended by the client."""
    with grpc.insecure_channel(meter.coordinator.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        kind = ("stream" if method.client_streaming else "unary", "stream" if method.server_streaming else "unary")
        stub = getattr(channel, "_".join(kind))(f"/{method.containing_service.full_name}/{method.name}")
        made = stub.future if kind == ("unary", "unary") else stub
        one = made(
            iter([data]) if method.client_streaming else data, timeout=60, metadata=bearer(token) if token else None
        )
        with contextlib.suppress(grpc.RpcError):
            list(one) if method.server_streaming else one.result()
        assert one.code() is grpc.StatusCode.OK or one.details(), "a status without a sentence"
        return one.code()


HOLDERS = {"no token": None, "a job's token": job_token(CLUSTER, "j"), "the cluster's token": CLUSTER}


def test_every_rpc_has_a_target() -> None:
    assert rpcs().keys() == TARGETS.keys()
    for rpc, method in rpcs().items():
        assert method.input_type.full_name == TARGETS[rpc].DESCRIPTOR.full_name


@pytest.mark.longer
@pytest.mark.parametrize("holder", tiers.pick(["no token", "a job's token"], ["the cluster's token"]))
@pytest.mark.parametrize("rpc", TARGETS)
def test_what_a_request_costs(meter: Meter, rpc: str, holder: str) -> None:
    method, token = rpcs()[rpc], HOLDERS[holder]
    is_refused = holder != "the cluster's token" and (
        token is None or f"/{method.containing_service.full_name}/{method.name}" not in OF_ONE_JOB
    )
    is_trusted = holder == "the cluster's token"
    most = REFUSED_CALLS if is_refused else CLUSTER_CALLS if is_trusted else MOST_CALLS
    sent = list(itertools.islice(requests(rpc), 2 if is_refused else None))  # a refused one is not read
    costs: dict[str, int] = {}
    call(meter, method, sent[0][1], token)  # what a first call makes stays
    gc.collect()
    tracemalloc.start()
    try:
        for what, data in sent:
            for _ in range(3):  # the event loop has other work now and then, so the cheapest of some counts
                code, count = meter.of(functools.partial(call, meter, method, data, token))
                costs[what] = min(count, costs.get(what, count))
                assert code not in BAD, what
                assert not is_refused or code is grpc.StatusCode.UNAUTHENTICATED, what
                if count <= most:
                    break
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert {what: count for what, count in costs.items() if count > most} == {}
    if not is_trusted:
        assert kept < KEPT_BYTES
