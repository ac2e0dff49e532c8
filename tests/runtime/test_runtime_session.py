"""Joining when the other side is absent, hostile, or not a coordinator at all: always a sentence with the address."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from error_codes import ends_with
from resources import eventually
from runtime_harness import threads_of_streams
from tcp_proxy import Proxy

from benchmarks.ports import free_ports
from horovod.base.errors import AccessCode, EngineCode, OperationCode, WorldCode, code_of, coded, without_code
from horovod.base.protocol import PROTOCOL_VERSION
from horovod.coordinator.config import Limits
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.protos.v1 import membership_pb2, membership_pb2_grpc
from horovod.worker.runtime.channel import explain
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.probe import judge
from horovod.worker.runtime.session import Session
from horovod.worker.runtime.tls import ClientTls

Events = list[membership_pb2.MembershipEvent]


def request(size: int = 2, version: int = PROTOCOL_VERSION) -> Callable[[], membership_pb2.JoinRequest]:
    counter = iter(range(1_000_000))
    return lambda: membership_pb2.JoinRequest(
        protocol_version=version,
        job="job",
        member_id=f"member-{next(counter)}",
        size=size,
        host=membership_pb2.HostIdentity(name="node-a", shared_memory_domain="domain"),
        pid=1,
    )


def refusal(
    address: str, seconds: float = 30.0, token: str | None = None, tls: ClientTls | None = None, **changes: Any
) -> str:
    """The sentence with which a join fails."""
    before = threads_of_streams()
    session = Session(address, token, tls=tls)
    try:
        with pytest.raises(StartError) as caught:
            session.join(request(**changes), time.monotonic() + seconds)
    finally:
        session.close()
    assert set(threads_of_streams()) <= set(before)
    assert code_of(caught.value) is not None
    return str(caught.value)


class Scripted(membership_pb2_grpc.MembershipServicer):
    """A gRPC server that answers every join with the same events, and may keep the stream open."""

    def __init__(self, events: Events, stay: bool = False) -> None:
        self._events, self._stay = events, stay
        self.released = threading.Event()
        self.heard: list[membership_pb2.MemberMessage] = []

    def Join(self, request_iterator: Any, context: Any) -> Iterator[membership_pb2.MembershipEvent]:  # noqa: N802
        self.heard.append(next(request_iterator))
        yield from self._events
        while self._stay and (message := next(request_iterator, None)):
            self.heard.append(message)
        self.released.set()


@contextlib.contextmanager
def scripted(servicer: Scripted) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    membership_pb2_grpc.add_MembershipServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A TCP server that is no gRPC server."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_sockets: list[socket.socket] = []

    def serve_one(client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            answer(client)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                open_sockets.append(client)
                threading.Thread(target=serve_one, args=(client,), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for client in open_sockets:
            client.close()


def unused_address() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


# -- nobody there, or the wrong one ------------------------------------------------------------------------------------
def test_nobody_there():
    address = unused_address()
    said = ends_with(WorldCode.COORDINATOR_UNREACHABLE, address, "Connection refused", "HOROVOD_COORDINATOR")
    assert re.search(said, refusal(address, seconds=1.0))


def test_a_name_that_does_not_exist():
    said = ends_with(WorldCode.COORDINATOR_UNREACHABLE, "node-x.invalid:29400")
    assert re.search(said, refusal("node-x.invalid:29400", seconds=0.5))


def echo(client: socket.socket) -> None:
    while data := client.recv(4096):
        client.sendall(data)


def http(client: socket.socket) -> None:
    client.recv(4096)
    client.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    client.recv(4096)


def tls(client: socket.socket) -> None:
    client.recv(4096)
    client.sendall(bytes.fromhex("15030300020246") + b"padding")
    client.close()


def garbage(client: socket.socket) -> None:
    client.sendall(bytes(range(256)) * 64)


@pytest.mark.parametrize(
    ("server", "code", "answer"),
    [
        (echo, WorldCode.NOT_A_COORDINATOR, b"PRI * HTT"),
        (http, WorldCode.NOT_A_COORDINATOR, b"HTTP/1.1 "),
        (garbage, WorldCode.NOT_A_COORDINATOR, bytes(range(9))),
        (tls, AccessCode.TLS_ON_ONE_SIDE, ""),
    ],
)
def test_something_else_on_the_port_is_recognized_at_once(server, code, answer):
    with answering(server) as address:
        text = refusal(address)  # long before the deadline, or the test times out
        assert re.search(ends_with(code, address, answer), text)


def silent(client: socket.socket) -> None:
    client.recv(0)


def closing(client: socket.socket) -> None:
    client.close()


@pytest.mark.parametrize("server", [silent, closing])
def test_something_that_may_become_a_coordinator_is_waited_for(server):
    with answering(server) as address:
        said = ends_with(WorldCode.COORDINATOR_UNREACHABLE, address, "Gave up after 1 s.")
        assert re.search(said, refusal(address, seconds=1.0))


def test_first_bytes_are_judged():
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    assert not judge(settings).hopeless
    assert not judge(b"").hopeless
    assert judge(b"SSH-2.0-O").hopeless
    assert judge(settings[:5]).hopeless


def test_a_coordinator_that_comes_late_is_found():
    address = unused_address()
    session = Session(address)
    try:
        with futures.ThreadPoolExecutor(1) as pool:
            joining = pool.submit(session.join, request(size=1), time.monotonic() + 50)
            with EmbeddedCoordinator(address):
                assert joining.result().size == 1
                session.close()
    finally:
        session.close()


# -- a coordinator that says no ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("token", [None, "wrong"])
def test_the_wrong_token(token):
    with EmbeddedCoordinator(token="right") as coordinator:
        address = coordinator.address
        text = refusal(address, token=token)
    assert re.search(ends_with(AccessCode.WRONG_TOKEN, address, "HOROVOD_TOKEN"), text)
    assert "wrong" not in without_code(text)


def test_the_wrong_token_for_the_first_of_several_is_no_matter_where_another_one_takes_it():
    with EmbeddedCoordinator(token="other") as first, EmbeddedCoordinator(token="right") as second:
        addresses = f"{first.address},{second.address}"
        session = Session(addresses, "right")
        try:
            assert session.join(request(size=1), time.monotonic() + 30).size == 1
            assert session.address == second.address
        finally:
            session.close()
        text = refusal(addresses, token="wrong")
        assert re.search(ends_with(AccessCode.WRONG_TOKEN, first.address, second.address), text)


def test_the_right_token():
    with EmbeddedCoordinator(token="right") as coordinator:
        session = Session(coordinator.address, "right")
        try:
            assert session.join(request(size=1), time.monotonic() + 30).size == 1
        finally:
            session.close()


def test_another_version_of_the_protocol(coordinator):
    text = refusal(coordinator.address, version=99)
    assert re.search(ends_with(WorldCode.OTHER_VERSION, coordinator.address, "99"), text)


def test_a_grpc_server_that_is_no_coordinator():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    text = refusal(f"127.0.0.1:{port}")
    server.stop(None).wait()
    assert re.search(ends_with(WorldCode.NOT_A_COORDINATOR, f"127.0.0.1:{port}"), text)


def test_missing_members_are_named_at_the_deadline(coordinator):
    text = refusal(coordinator.address, seconds=1.0)
    assert re.search(ends_with(WorldCode.INCOMPLETE_WORLD, "after 1 s", "1 of 2 members"), text)


def test_a_coordinator_that_says_nothing():
    with scripted(Scripted([], stay=True)) as address:
        text = refusal(address, seconds=1.0)
    assert re.search(ends_with(WorldCode.INCOMPLETE_WORLD, address), text)


def test_a_world_that_is_none():
    event = membership_pb2.MembershipEvent(world=membership_pb2.World(job="job", epoch=1))
    with scripted(Scripted([event], stay=True)) as address:
        assert code_of(refusal(address)) is EngineCode.INTERNAL


def test_every_status_has_a_sentence_with_the_address():
    for code in grpc.StatusCode:
        for details in ("", "because", "Because."):
            text = explain(code, details, "h:1", with_token=False)
            assert "h:1" in text
            assert code_of(text) is not None
            assert without_code(text).endswith(".")
            assert ".." not in text


def test_a_status_keeps_its_code() -> None:
    """What the coordinator said is what was wrong, also where a sentence goes on after it."""
    for code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE):
        text = explain(code, coded(WorldCode.EPOCH_OVER, "Because."), "h:1", with_token=True)
        assert re.search(ends_with(WorldCode.EPOCH_OVER, "h:1", "Because."), text)
        assert text.count("[") == 1


# -- membership --------------------------------------------------------------------------------------------------------
def one_world() -> membership_pb2.MembershipEvent:
    world = membership_pb2.World(job="job", epoch=7, secret=b"s" * 32)
    world.hosts.add().identity.name = "node-a"
    for rank in range(2):
        world.members.add(member_id=f"member-{rank}", pid=100 + rank)
        world.local_ranks.append(rank)
        world.cross_ranks.append(0)
    return membership_pb2.MembershipEvent(world=world)


def gone(epoch: int, rank: int, orderly: bool) -> membership_pb2.MembershipEvent:
    event = membership_pb2.MemberGone(
        epoch=epoch, rank=rank, orderly=orderly, sentence=f"Rank {rank} of world {epoch}."
    )
    return membership_pb2.MembershipEvent(gone=event)


class Listening:
    """Stands where the engine is told about members; records what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.enough = threading.Event()

    def peer_left(self, rank: int, sentence: str) -> None:
        self.heard.append(("left", rank, sentence))

    def abort(self, sentence: str) -> None:
        self.heard.append(("abort", sentence))
        self.enough.set()


def test_members_that_are_gone_are_told_to_the_engine_in_order_and_stale_ones_are_not():
    events = [one_world(), gone(6, 1, False), gone(7, 1, True), gone(7, 1, False)]
    servicer = Scripted(events, stay=True)
    with scripted(servicer) as address:
        session = Session(address)
        world = session.join(request(), time.monotonic() + 30)
        assert (world.epoch, world.rank) == (7, 0)
        engine = Listening()
        session.member.attach(engine)  # type: ignore[arg-type]
        assert engine.enough.wait(30)
        sentence = "Rank 1 of world 7."
        left, lost = coded(OperationCode.SHUT_DOWN, sentence), coded(OperationCode.PEER_LOST, sentence)
        assert engine.heard == [("left", 1, left), ("abort", lost)]
        session.close("test is over")
        assert servicer.released.wait(30)
    last = servicer.heard[-1]
    assert (last.leave.epoch, last.leave.reason) == (7, "test is over")


def test_a_member_that_goes_before_the_engine_stands_ends_the_start():
    with scripted(Scripted([one_world(), gone(7, 1, False)], stay=True)) as address:
        session = Session(address)
        session.join(request(), time.monotonic() + 30)
        with pytest.raises(StartError, match=ends_with(OperationCode.PEER_LOST, "Rank 1 of world 7")):  # noqa: PT012
            while True:
                session.member.check()
        session.close()


def test_a_refusal_after_the_world_ends_the_epoch():
    no = membership_pb2.MembershipEvent(refused=membership_pb2.Refused(sentence="You were declared lost."))
    with scripted(Scripted([one_world(), no])) as address:
        session = Session(address)
        with contextlib.suppress(StartError):  # the refusal may overtake the caller
            session.join(request(), time.monotonic() + 30)
            engine = Listening()
            session.member.attach(engine)  # type: ignore[arg-type]
        session.close()


def test_close_works_after_a_join_that_could_not_begin():
    session = Session("127.0.0.1:1", None)
    with pytest.raises(TypeError):
        session.join(lambda: "no request", time.monotonic() + 10)  # type: ignore[arg-type,return-value]
    session.close()


def test_close_is_idempotent_and_works_without_a_join():
    session = Session(unused_address())
    session.close()
    session.close()


def test_a_world_of_more_than_4_mib_is_received(coordinator: EmbeddedCoordinator) -> None:
    """gRPC's own limit. Few members say as much of themselves here as thousands do."""
    members = 5

    def large(number: int) -> membership_pb2.JoinRequest:
        made = request(size=members)()
        made.member_id = f"large-{number}"
        for interface in range(250):
            made.endpoints.add(address="127.0.0.1", port=1, interface=f"{number} {interface} ".ljust(4000, "x"))
        return made

    def join(number: int) -> int:
        session = Session(coordinator.address)
        try:
            world = session.join(lambda: large(number), time.monotonic() + 30)
            return sum(len(member.endpoints) for member in world.members)
        finally:
            session.close()

    with futures.ThreadPoolExecutor(members) as pool:
        assert list(pool.map(join, range(members))) == [members * 250] * members


def test_a_coordinator_that_was_restarted_is_told_in_a_warning_and_the_engine_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = EmbeddedCoordinator(token="token").start()
    session = Session(first.address, "token")
    try:
        session.join(request(size=1), time.monotonic() + 30)
        engine = Listening()
        session.member.attach(engine)  # type: ignore[arg-type]
        address = first.address
        first.stop()
        with EmbeddedCoordinator(address, token="token"):
            assert eventually(lambda: bool(session.member.lost))
        assert "it was restarted. Operations that every rank has run before continue." in caplog.text
        assert engine.heard == []
    finally:
        session.close()


def test_a_member_that_was_declared_lost_ends_its_engine() -> None:
    limits = Limits(reattach_grace_s=0.1)
    with EmbeddedCoordinator(limits=limits, token="token") as coordinator, Proxy(coordinator.address) as proxy:
        session = Session(proxy.address, "token")
        other = Session(coordinator.address, "token")
        try:
            with futures.ThreadPoolExecutor(2) as pool:
                member_ids = iter(("a", "b"))

                def named() -> membership_pb2.JoinRequest:
                    made = request(size=2)()
                    made.member_id = next(member_ids)
                    return made

                joins = [pool.submit(one.join, named, time.monotonic() + 30) for one in (session, other)]
                assert {join.result().size for join in joins} == {2}
            engine, its_engine = Listening(), Listening()
            session.member.attach(engine)  # type: ignore[arg-type]
            other.member.attach(its_engine)  # type: ignore[arg-type]
            proxy.refuse()
            assert its_engine.enough.wait(30)
            proxy.admit()
            assert engine.enough.wait(30)
            assert code_of(engine.heard[-1][1]) is WorldCode.DECLARED_LOST
        finally:
            session.close()
            other.close()
