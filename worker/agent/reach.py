"""Whether hosts reach each other: the agent's port for probes, and its own probes of others.

A probe connects and sends a nonce; it gets HMAC-SHA256 of that and the name of the agent which answers, with the secret
that all agents of one coordinator have. So an address counts as reached only when the right host answers: bridges of
containers have the same address on every host, and would answer from this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Sequence

from horovod.protos.v1 import agents_pb2

_NONCE_BYTES = 32
_ANSWER_BYTES = hashlib.sha256().digest_size
_ASK_TIMEOUT_S = 5.0  # for a peer that connects and says nothing
_AT_ONCE = 64


class ProbePort:
    """Listens on every address of this host."""

    def __init__(self, name: str) -> None:
        self.port = 0
        self._secret = b""
        self._has_secret = asyncio.Event()
        self._name = name
        self._server: asyncio.Server | None = None

    @property
    def secret(self) -> bytes:
        """The secret of the coordinator that this agent is registered with; empty until that has told it.

        Others may know it sooner and ask already: they wait for the answer, rather than take this host for unreachable.
        """
        return self._secret

    @secret.setter
    def secret(self, secret: bytes) -> None:
        self._secret = secret
        if secret:
            self._has_secret.set()
        else:
            self._has_secret.clear()

    async def start(self) -> None:
        """Begins to listen. OSError when no port is free."""
        self._server = await asyncio.start_server(self._answer, host=None, port=0)
        # With host=None each family may get a port of its own; one number is easier for everybody.
        self.port = self._server.sockets[0].getsockname()[1]
        if any(socket.getsockname()[1] != self.port for socket in self._server.sockets):
            self._server.close()
            self._server = await asyncio.start_server(self._answer, host=None, port=self.port)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
            nonce = await asyncio.wait_for(reader.readexactly(_NONCE_BYTES), _ASK_TIMEOUT_S)
            await asyncio.wait_for(self._has_secret.wait(), _ASK_TIMEOUT_S)
            writer.write(_proof(self.secret, nonce, self._name))
            await asyncio.wait_for(writer.drain(), _ASK_TIMEOUT_S)
        writer.close()


async def probe(targets: Sequence[agents_pb2.Target], secret: bytes, timeout_s: float) -> list[agents_pb2.Target]:
    """The targets at which the agent with the target's name answers in time."""
    at_once = asyncio.Semaphore(_AT_ONCE)
    found = await asyncio.gather(*(_reaches(target, secret, timeout_s, at_once) for target in targets))
    return [target for target, reached in zip(targets, found, strict=True) if reached]


async def _reaches(target: agents_pb2.Target, secret: bytes, timeout_s: float, at_once: asyncio.Semaphore) -> bool:
    nonce = secrets.token_bytes(_NONCE_BYTES)

    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection(target.address, target.port)
        try:
            writer.write(nonce)
            return await reader.readexactly(_ANSWER_BYTES)
        finally:
            writer.close()

    async with at_once:
        try:
            answer = await asyncio.wait_for(ask(), timeout_s)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            return False
    return hmac.compare_digest(answer, _proof(secret, nonce, target.agent))


def _proof(secret: bytes, nonce: bytes, name: str) -> bytes:
    return hmac.new(secret, b"horovod probe" + nonce + name.encode(), hashlib.sha256).digest()
