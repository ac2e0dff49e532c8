"""Whatever the server that a process joins says, the process gets a world that it can use or a StartError."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from messages import messages

from horovod.base.errors import EngineCode, code_of
from horovod.base.protocol import PROTOCOL_VERSION
from horovod.protos.v1 import membership_pb2
from horovod.worker.runtime.errors import MemberLostError, StartError
from horovod.worker.runtime.probe import judge
from horovod.worker.runtime.session import Session
from horovod.worker.runtime.world import World

FUZZ = settings(
    deadline=None, max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=True
)
JOIN = "/horovod.v1.Membership/Join"


class Saying(grpc.GenericRpcHandler):
    """A server that answers every join with these bytes and ends the stream, in order or with a status."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.code: grpc.StatusCode | None = None

    def service(self, handler_call_details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._join) if handler_call_details.method == JOIN else None

    def _join(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        next(requests)
        yield from self.said
        if self.code is not None:
            context.abort(self.code, "")


class Engine:
    """Keeps what a session tells."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def peer_left(self, rank: int, sentence: str) -> None:
        self.heard.append(sentence)

    def abort(self, sentence: str) -> None:
        self.heard.append(sentence)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Saying, str]]:
    saying = Saying()
    running = grpc.server(futures.ThreadPoolExecutor(4))
    running.add_generic_rpc_handlers((saying,))
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield saying, f"127.0.0.1:{port}"
    running.stop(None).wait()


def use(world: World) -> None:
    """What the runtime does with a world before its members are connected."""
    assert world.members[world.rank] == world.me
    assert [world.label(rank) for rank in range(world.size)]
    assert len(world.placement()) == world.size
    assert len(world.sharing_hosts()) in (0, world.size)
    assert world.why_not_shared_memory() is None or world.why_not_shared_memory()
    assert all(endpoint.is_usable() for member in world.members for endpoint in member.endpoints)
    assert world.subset([world.rank], b"s" * 32).rank == 0


def nearly_good(world: membership_pb2.World, size: int) -> membership_pb2.World:
    """Ranks, ids, addresses and a secret that pass; the rest stays as it is."""
    del world.members[size:]
    while len(world.members) < size:
        world.members.add()
    del world.hosts[1:]
    if not world.hosts:
        world.hosts.add()
    del world.local_ranks[:], world.cross_ranks[:]
    for rank, member in enumerate(world.members):
        member.host, member.member_id = 0, f"member-{rank}"
        world.local_ranks.append(rank)
        world.cross_ranks.append(0)
        del member.interfaces[:], member.ports[:]
    world.secret, world.epoch = b"s" * 32, 1
    return world


def of_this_epoch(gone: membership_pb2.MemberGone) -> membership_pb2.MembershipEvent:
    gone.epoch = 1
    return membership_pb2.MembershipEvent(gone=gone)


WORLDS = st.one_of(
    messages(membership_pb2.World), st.builds(nearly_good, messages(membership_pb2.World), st.integers(1, 4))
)


@FUZZ
@given(message=WORLDS)
def test_a_world(message: membership_pb2.World) -> None:
    try:
        world = World.from_message(message, "member-0")
    except StartError as error:
        assert code_of(error) is EngineCode.INTERNAL  # noqa: PT017  (both ends are good)
    else:
        use(world)


EVENTS = st.one_of(
    messages(membership_pb2.MembershipEvent),
    WORLDS.map(lambda world: membership_pb2.MembershipEvent(world=world)),
    messages(membership_pb2.MemberGone).map(of_this_epoch),
)


@FUZZ
@given(
    events=st.lists(EVENTS.map(lambda event: event.SerializeToString()), max_size=4),
    noise=st.one_of(st.none(), st.binary(max_size=20)),
    code=st.sampled_from([None, *grpc.StatusCode]),
)
def test_a_session(
    server: tuple[Saying, str], events: list[bytes], noise: bytes | None, code: grpc.StatusCode | None
) -> None:
    saying, address = server
    saying.said = [*events, *([noise] if noise is not None else [])]
    saying.code = None if code is grpc.StatusCode.OK else code
    failures: list[Any] = []
    hook, threading.excepthook = threading.excepthook, failures.append
    session = Session(address)
    engine = Engine()
    try:
        world = session.join(
            lambda: membership_pb2.JoinRequest(
                protocol_version=PROTOCOL_VERSION, job="job", member_id="member-0", size=2
            ),
            time.monotonic() + 0.05,  # it may try again until then
        )
    except StartError as error:
        assert len(str(error).split()) > 3  # noqa: PT017  (both ends are good)
    else:
        use(world)
        with contextlib.suppress(MemberLostError):
            session.member.check()
        session.member.attach(engine)  # type: ignore[arg-type]
    finally:
        session.close()
        threading.excepthook = hook
    assert not failures, failures
    assert all(engine.heard)


@FUZZ
@given(answer=st.one_of(st.binary(max_size=9), st.binary(min_size=9, max_size=9)))
def test_first_bytes_of_something_else(answer: bytes) -> None:
    assert judge(answer).words
