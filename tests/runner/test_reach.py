"""Probes between agents, over loopback."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from horovod.protos.v1 import agents_pb2
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
