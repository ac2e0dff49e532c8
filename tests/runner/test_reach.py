"""Probes between agents, over loopback."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from error_codes import ends_with
from ports import free_ports

from horovod.base.errors import ClusterCode
from horovod.protos.v1 import agents_pb2
from horovod.worker.agent import reach
from horovod.worker.agent.reach import ProbePort, probe


async def asked(name: str, secrets: list[bytes]) -> bool:
    """Whether an agent called `name`, which is told `secrets` one after the other, answers one that knows b"secret"."""
    port = ProbePort("h1")
    await port.start()
    try:
        target = agents_pb2.Target(agent=name, address="127.0.0.1", port=port.port)
        asking = asyncio.create_task(probe([target], b"secret", 60.0))
        for secret in secrets:
            await asyncio.wait({asking}, timeout=0.1)  # the question is there before the secret
            port.secret = secret
        return await asking == [target]
    finally:
        port.close()


@pytest.mark.parametrize(
    ("name", "secrets", "reached"),
    [("h1", [b"secret"], True), ("h1", [b"", b"secret"], True), ("h2", [b"secret"], False), ("h1", [b"other"], False)],
)
def test_who_is_reached(name: str, secrets: list[bytes], reached: bool) -> None:
    """An agent that has not been told the secret yet is no host that can't be reached."""
    assert asyncio.run(asked(name, secrets)) is reached


def test_the_port_is_one_of_those_that_are_named() -> None:
    ports = free_ports(2)

    async def take_all() -> None:
        taken = [ProbePort(name, ports) for name in ("h1", "h2")]
        for one in taken:
            await one.start()
        assert sorted(one.port for one in taken) == list(ports)
        with pytest.raises(OSError, match=ends_with(ClusterCode.PORT_IN_USE, f"{ports[0]} to {ports[-1]}")):
            await ProbePort("h3", ports).start()
        for one in taken:
            one.close()

    asyncio.run(take_all())


async def what_strangers_get(port: ProbePort) -> None:
    """A browser (DNS rebinding), one that says nothing, one with a wrong proof, and one that has heard a probe."""
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readexactly(64))
        writer.write(heard[0][32:])  # its own proof, sent back
        writer.close()

    impostor = await asyncio.start_server(listen, "127.0.0.1", 0)
    number = impostor.sockets[0].getsockname()[1]
    assert await probe([agents_pb2.Target(agent="h1", address="127.0.0.1", port=number)], b"secret", 60.0) == []
    impostor.close()
    nonce, proof = heard[0][:32], heard[0][32:]
    told = [b"GET / HTTP/1.1\r\nHost: attacker.example\r\n".ljust(64, b"x"), bytes(64), nonce[::-1] + proof]
    for question in told:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(question)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


def test_strangers_get_no_answer() -> None:
    async def body() -> None:
        port = ProbePort("h1")
        port.secret = b"secret"
        await port.start()
        try:
            await what_strangers_get(port)
        finally:
            port.close()

    asyncio.run(body())


def test_silent_connections_keep_no_agent_from_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the connections that say nothing the port keeps no more than it has seats for; the oldest ones end."""
    monkeypatch.setattr(reach, "MOST_OF_PEER", 8)
    monkeypatch.setattr(reach, "_ASK_TIMEOUT_S", 1000.0)

    async def body() -> None:
        port = ProbePort("h1")
        port.secret = b"secret"
        await port.start()
        silent = [await asyncio.open_connection("127.0.0.1", port.port) for _ in range(40)]
        try:
            for reader, _ in silent[:32]:
                assert await asyncio.wait_for(reader.read(), 60) == b""
            target = agents_pb2.Target(agent="h1", address="127.0.0.1", port=port.port)
            assert await probe([target], b"secret", 60.0) == [target]
            assert not silent[-1][0].at_eof()
        finally:
            for _, writer in silent:
                writer.close()
            port.close()

    asyncio.run(body())


def test_a_port_that_another_process_takes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPv6 gets the number that IPv4 has got, for which the agent closes the port for a moment."""
    real, taken = asyncio.start_server, []

    async def start_server(*arguments: Any, port: int, **options: Any) -> asyncio.Server:
        if port and not taken:
            taken.append(socket.create_server(("127.0.0.1", port)))
        return await real(*arguments, port=port, **options)

    monkeypatch.setattr(asyncio, "start_server", start_server)
    try:
        assert asyncio.run(asked("h1", [b"secret"]))
    finally:
        for one in taken:
            one.close()
