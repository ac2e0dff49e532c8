"""Whether hosts reach each other: the agent's port for probes, and its own probes of others.

A probe connects to an agent's port and sends a nonce, with proof that it knows the secret which all agents of one
coordinator have: the HMAC-SHA256 of the nonce and the name of the agent that it looks for. That agent answers with
another one of both. So an address counts as reached only when the right host answers: the bridge of containers has the
same address on every host, and there this host would answer itself. Nobody else gets an answer, and those who connect
and prove nothing take seats from each other only (base/seats.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import random
import secrets
from collections.abc import Sequence

from horovod.base.errors import ClusterCode, coded
from horovod.base.seats import Seats, peer_of
from horovod.protos.v1 import agents_pb2

# Each agent has one connection here at a time, and there may be many agents on one host.
MOST_AT_ONCE = 512
MOST_OF_PEER = 256
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_ASKS, _ANSWERS = b"horovod probe asks", b"horovod probe"  # different, so that no proof can be sent back
_ASK_TIMEOUT_S = 5.0  # how long a peer that has connected may send nothing
_AT_ONCE = 64
_TRIES = 10


class ProbePort:
    """The port on which this agent answers probes, at every address of this host."""

    def __init__(self, name: str, ports: Sequence[int] = ()) -> None:
        """ports: those of HOROVOD_PORTS; none: the system chooses."""
        self.port = 0
        self._ports = ports
        self._secret = b""
        self._has_secret = asyncio.Event()
        self._name = name
        self._server: asyncio.Server | None = None
        self._seats: Seats[asyncio.Task[None]] = Seats(MOST_AT_ONCE, MOST_OF_PEER)

    @property
    def secret(self) -> bytes:
        """The secret of the coordinator that this agent is registered with; empty until the coordinator has sent it.

        Other agents may have the secret earlier and send a probe already. The port then answers when it has the secret,
        so that they do not take this host for unreachable.
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
        for port in random.sample(self._ports, len(self._ports)):
            with contextlib.suppress(OSError):  # in use, at one of the addresses at least
                self._server = await asyncio.start_server(self._answer, host=None, port=port)
                self.port = port
                return
        if self._ports:
            sentence = f"The ports {self._ports[0]} to {self._ports[-1]} (HOROVOD_PORTS) are in use on this host."
            raise OSError(errno.EADDRINUSE, coded(ClusterCode.PORT_IN_USE, sentence))
        for tries_left in reversed(range(_TRIES)):
            self._server = await asyncio.start_server(self._answer, host=None, port=0)
            # With host=None IPv4 and IPv6 may get different ports; one number can be told to other agents.
            self.port = self._server.sockets[0].getsockname()[1]
            if all(socket.getsockname()[1] == self.port for socket in self._server.sockets):
                return
            self._server.close()
            # Meanwhile another process may take that port, or have it for IPv6.
            try:
                self._server = await asyncio.start_server(self._answer, host=None, port=self.port)
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not tries_left:
                    raise

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering = asyncio.current_task()
        assert answering is not None
        address, *_ = writer.get_extra_info("peername") or ("",)
        if (going := self._seats.take(peer_of(address), answering)) is not None:
            going.cancel()
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                nonce = await asyncio.wait_for(reader.readexactly(_NONCE_BYTES), _ASK_TIMEOUT_S)
                given = await asyncio.wait_for(reader.readexactly(_PROOF_BYTES), _ASK_TIMEOUT_S)
                await asyncio.wait_for(self._has_secret.wait(), _ASK_TIMEOUT_S)
                if hmac.compare_digest(given, _proof(_ASKS, self.secret, nonce, self._name)):
                    self._seats.spoke(answering)
                    writer.write(_proof(_ANSWERS, self.secret, nonce, self._name))
                    await asyncio.wait_for(writer.drain(), _ASK_TIMEOUT_S)
        finally:
            self._seats.leave(answering)
            writer.close()


async def probe(targets: Sequence[agents_pb2.Target], secret: bytes, timeout_s: float) -> list[agents_pb2.Target]:
    """Those of the targets at which the agent of that name answers in time."""
    at_once = asyncio.Semaphore(_AT_ONCE)
    found = await asyncio.gather(*(_reaches(target, secret, timeout_s, at_once) for target in targets))
    return [target for target, reached in zip(targets, found, strict=True) if reached]


async def _reaches(target: agents_pb2.Target, secret: bytes, timeout_s: float, at_once: asyncio.Semaphore) -> bool:
    nonce = secrets.token_bytes(_NONCE_BYTES)

    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection(target.address, target.port)
        try:
            writer.write(nonce + _proof(_ASKS, secret, nonce, target.agent))
            return await reader.readexactly(_PROOF_BYTES)
        finally:
            writer.close()

    async with at_once:
        try:
            answer = await asyncio.wait_for(ask(), timeout_s)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            return False
    return hmac.compare_digest(answer, _proof(_ANSWERS, secret, nonce, target.agent))


def _proof(direction: bytes, secret: bytes, nonce: bytes, name: str) -> bytes:
    return hmac.new(secret, direction + nonce + name.encode(), hashlib.sha256).digest()
