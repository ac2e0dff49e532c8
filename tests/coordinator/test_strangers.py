"""Attacks of somebody who can connect and has no token: what a coordinator keeps for them, and whom they keep out.

Each test is an attack from a few addresses (all of 127.0.0.0/8 are this host's), beside an honest client that must be
served. What they assert are counts and bytes, never seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from certificates import Authority
from coordinator_builders import op
from coordinator_client import Crew
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from benchmarks.strangers import HEALTH, LARGE, Attacker
from horovod.base.seats import Seats, peer_of, peer_of_grpc
from horovod.base.telemetry import http
from horovod.base.telemetry.http import Answer, WebServer
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.services import health, strangers
from horovod.coordinator.services.health import SERVING

ATTACKERS = 12  # addresses of the attacker: more than it takes to fill all seats


# -- who has to make room ----------------------------------------------------------------------------------------------
def test_a_newcomer_takes_the_seat_of_the_oldest_silent_guest() -> None:
    seats: Seats[str] = Seats(most=4, most_of_peer=3)
    assert [seats.take("a", guest) for guest in ("a1", "a2", "a3")] == [None] * 3
    seats.spoke("a1")
    assert seats.take("b", "b1") is None
    assert seats.take("b", "b2") == "a2", "of the peer that has the most: the oldest one that says nothing"
    assert seats.take("c", "c1") in ("a3", "b1")
    assert len(seats) == 4


def test_a_peer_with_all_its_seats_takes_them_from_itself() -> None:
    seats: Seats[int] = Seats(most=100, most_of_peer=3)
    assert [seats.take("a", number) for number in range(6)] == [None, None, None, 0, 1, 2]
    for number in (3, 4, 5):
        seats.spoke(number)
    assert seats.take("a", 6) == 3, "if all have spoken, the oldest of them"
    for number in (1, 4, 5, 6, 6):
        seats.leave(number)
    assert len(seats) == 0
    seats.spoke(6)
    assert len(seats) == 0


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("2001:db8:1:2::1", "2001:db8:1:2:3::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_what_counts_as_one_peer(one: str, other: str, equal: bool) -> None:
    assert (peer_of(one) == peer_of(other)) is equal
    names = [f"ipv6:%5B{each}%5D:1" if ":" in each else f"ipv4:{each}:1" for each in (one, other)]
    assert [peer_of_grpc(name) for name in names] == [peer_of(one), peer_of(other)]


# -- pages and probes --------------------------------------------------------------------------------------------------
async def ok() -> Answer:
    return Answer("ok\n")


async def large() -> Answer:
    return Answer("x" * (8 << 20))


async def ask(port: int, page: str = "/healthz") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {page} HTTP/1.1\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


def silent(port: int, number: int, says: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(f"127.0.1.{number + 1}", 0))
    connection.sendall(says)
    return connection


@contextlib.contextmanager
def crowd(port: int, each: int, says: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections of ATTACKERS addresses, which say this and read nothing."""
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(silent(port, number, says)) for _ in range(each) for number in range(ATTACKERS)]


@pytest.mark.parametrize("says", [b"", b"GET /healthz HT", b"GET /large HTTP/1.1\r\n\r\n"], ids=["", "half", "deaf"])
def test_whoever_connects_keeps_no_probe_from_its_answer(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_S", 600.0)
    monkeypatch.setattr(http, "ANSWER_S", 600.0)

    async def attack() -> None:
        web = WebServer({"/healthz": ok, "/large": large})
        port = await web.start("127.0.0.1", 0)
        with contextlib.ExitStack() as opened:
            await asyncio.to_thread(opened.enter_context, crowd(port, 6, says))
            for _ in range(2):
                assert (await ask(port)).endswith(b"ok\n")
            assert len(web._seats) == len(web._readers) <= http.MAX_READERS
        await web.stop()
        assert not web._seats

    asyncio.run(attack())


@pytest.mark.parametrize("says", [b"", b"GET /large HTTP/1.1\r\n\r\n"], ids=["silent", "deaf"])
def test_a_connection_that_does_not_get_on_ends(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_S" if not says else "ANSWER_S", 0.05)

    async def attack() -> None:
        web = WebServer({"/healthz": ok, "/large": large})
        port = await web.start("127.0.0.1", 0)
        with silent(port, 0, says):
            await ask(port)  # which is accepted after the silent one
            if web._readers:
                await asyncio.wait(web._readers)
        await web.stop()

    asyncio.run(asyncio.wait_for(attack(), 60))


def test_handshakes_of_tls_take_seats_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_S", 600.0)
    authority = Authority(tmp_path)
    context = ssl.create_default_context(cafile=authority.file)

    def read(port: int) -> bytes:
        plain = socket.create_connection(("127.0.0.1", port), timeout=60)
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            return connection.recv(1 << 16)

    async def attack() -> None:
        web = WebServer({"/healthz": ok})
        port = await web.start("127.0.0.1", 0, authority.server().web_context())
        with contextlib.ExitStack() as opened:
            await asyncio.to_thread(opened.enter_context, crowd(port, 6))
            assert (await asyncio.to_thread(read, port)).startswith(b"HTTP/1.1 200 ")
            assert len(web._seats) <= http.MAX_READERS
        await web.stop()

    asyncio.run(attack())


# -- calls without a token ---------------------------------------------------------------------------------------------
@pytest.fixture
def coordinator() -> Iterator[EmbeddedCoordinator]:
    with EmbeddedCoordinator(token="t") as running:
        yield running


def port_of(coordinator: EmbeddedCoordinator) -> int:
    return int(coordinator.address.rpartition(":")[2])


@contextlib.contextmanager
def attackers(port: int, count: int) -> Iterator[list[Attacker]]:
    with contextlib.ExitStack() as opened:
        found = [Attacker(port, number) for number in range(count)]
        for one in found:
            opened.enter_context(one.socket)
        yield found


def until(done: Callable[[], bool], *going_on: Attacker) -> None:
    """Lets these attackers send what the coordinator takes until this is so; the test's own limit ends it."""
    while not done():
        for one in going_on:
            with contextlib.suppress(OSError):
                one.go_on()


def is_served(coordinator: EmbeddedCoordinator, crew: Crew) -> None:
    """A member's world forms and it negotiates; a probe gets an answer."""
    one, other = crew.world(2, job="honest")
    for member in (one, other):
        member.negotiate(op("x"))
    for member in (one, other):
        member.plans(1)
    with grpc.insecure_channel(coordinator.address) as channel:
        check = channel.unary_unary(f"{HEALTH}Check", StringValue.SerializeToString, Int32Value.FromString)
        assert check(StringValue(), timeout=60).value == SERVING


@pytest.mark.parametrize("path", ["/horovod.v1.Jobs/Submit", "/horovod.v1.Membership/Serves"])
def test_a_refused_request_is_not_read(coordinator: EmbeddedCoordinator, path: str) -> None:
    with attackers(port_of(coordinator), 2) as found, Crew(coordinator.address, "t") as crew:
        for one in found:
            one.begin(path)
            until(lambda one=one: 1 in one.ended, one)  # type: ignore[misc]
            assert LARGE - one.unsent() < 1 << 16, "no more than HTTP/2 lets it send without asking"
        is_served(coordinator, crew)


def test_unfinished_requests_for_health_keep_nobody_out(
    coordinator: EmbeddedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "REQUEST_S", 600.0)
    with attackers(port_of(coordinator), 8) as found, Crew(coordinator.address, "t") as crew:
        for one in found:
            for _ in range(3):
                one.begin(f"{HEALTH}Check")
        standing = [(one, stream) for one in found for stream in (1, 3, 5)]
        until(lambda: sum(stream in one.ended for one, stream in standing) >= 24 - health.MAX_READ, *found)
        is_served(coordinator, crew)


def test_an_unfinished_request_for_health_ends(coordinator: EmbeddedCoordinator) -> None:
    with attackers(port_of(coordinator), 1) as (one,):
        one.begin(f"{HEALTH}Watch")
        until(lambda: 1 in one.ended, one)


def test_watches_of_health_are_few(coordinator: EmbeddedCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LOOK_S", 0.01)
    with attackers(port_of(coordinator), 1) as (one,), grpc.insecure_channel(coordinator.address) as channel:
        for _ in range(40):
            one.call(f"{HEALTH}Watch", StringValue().SerializeToString())
        until(lambda: len(one.ended) >= 40 - health.MAX_WATCHES_OF_PEER, one)
        watch = channel.unary_stream(f"{HEALTH}Watch", StringValue.SerializeToString, Int32Value.FromString)
        assert next(iter(watch(StringValue(), timeout=60))).value == SERVING


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_what_is_compressed_is_not_expanded(coordinator: EmbeddedCoordinator, compression: grpc.Compression) -> None:
    """grpcio before the fix of gRPC's issue 41996 expands a message, however large it becomes, to look at its size."""
    request = StringValue(value="x" * 64).SerializeToString()  # which is shorter than MAX_REQUEST_BYTES anyhow
    with grpc.insecure_channel(coordinator.address) as channel:
        for path, code in (
            (f"{HEALTH}Check", grpc.StatusCode.INVALID_ARGUMENT),
            ("/horovod.v1.Jobs/List", grpc.StatusCode.INVALID_ARGUMENT),
        ):
            call = channel.unary_unary(path)
            with pytest.raises(grpc.RpcError) as caught:
                call(request, compression=compression, metadata=(("authorization", "Bearer t"),), timeout=60)
            assert caught.value.code() is code, path


# -- connections without a token ---------------------------------------------------------------------------------------
def test_connections_that_show_nothing_end(coordinator: EmbeddedCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "FEW", 0)
    monkeypatch.setattr(strangers, "LOOK_S", 0.01)
    monkeypatch.setattr(strangers, "MAX_LOOKS", 4)
    with Crew(coordinator.address, "t") as crew, attackers(port_of(coordinator), 20) as found:
        member = crew.world(1, job="before")[0]
        with silent(port_of(coordinator), 0) as mute:
            mute.makefile("rb").read()  # until the coordinator ends it, before it has begun HTTP/2
        until(lambda: not any(one.stands() for one in found))
        member.negotiate(op("still here"))
        member.plans(1)


def test_one_address_has_only_so_many(coordinator: EmbeddedCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "FEW", 0)
    monkeypatch.setattr(strangers, "MAX_OF_PEER", 8)
    monkeypatch.setattr(strangers, "MAX_LOOKS", 1 << 30)
    monkeypatch.setattr("benchmarks.strangers.ADDRESSES", 1)
    with attackers(port_of(coordinator), 30) as found:
        until(lambda: sum(one.stands() for one in found) <= 8)
        assert sum(one.stands() for one in found) == 8


def test_a_connection_of_refused_calls_ends(coordinator: EmbeddedCoordinator) -> None:
    with attackers(port_of(coordinator), 1) as (one,), Crew(coordinator.address, "t") as crew:
        for _ in range(strangers.MAX_REFUSED + 1):
            one.call("/horovod.v1.Jobs/List")
        until(lambda: not one.stands())
        is_served(coordinator, crew)


def test_who_is_cut_off_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "MAX_OF_PEER", 6)
    monkeypatch.setattr(strangers, "MAX_STRANGERS", 8)
    few, many = [("10.0.0.1", port) for port in range(3)], [("10.0.0.2", port) for port in range(10)]
    assert list(strangers._too_many(few)) == []
    assert list(strangers._too_many(many)) == many[6:], "the latest: those before are closer to being served"
    assert list(strangers._too_many([*few, *many])) == many[5:], "of the address that has the most"
    others = [(f"10.0.1.{host}", 1) for host in range(8)]
    assert list(strangers._too_many([*few, *others])) == few[1:]
