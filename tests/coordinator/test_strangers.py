"""Attacks of somebody who can connect and has no token: what a coordinator keeps for them, and whom they keep out.

Each test is an attack from a few addresses (all of 127.0.0.0/8 are this host's), beside an honest client that must be
served. What they assert are counts and bytes, never seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority

from horovod.base.seats import Seats, peer_of, peer_of_grpc
from horovod.base.telemetry import http
from horovod.base.telemetry.http import Answer, WebServer

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
