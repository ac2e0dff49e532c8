"""The program through which everything of a tf.data service goes from one host to another (docs/adr/0116).

TensorFlow's servers and clients know neither keys nor certificates. So each process of a service starts this program,
and TensorFlow speaks to it alone:

    TensorFlow's client -> socket in a private folder -> relay == TLS, the key proven ==> relay -> TensorFlow's server

After the TLS handshake both sides prove the service's key. Each proof is made over the certificate that its side has
seen, so nobody can stand between two relays:

    listening: nonce      connecting: nonce + HMAC("connecting", ...)      listening: HMAC("listening", ...)

It is a process of its own because TensorFlow holds Python's lock while a worker registers. It imports no TensorFlow.
Orders come from the process that started it, one packet each on standard input, with descriptors (`fence.Relay`); when
that process has ended, this one removes the folder and ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import shutil
import signal
import socket
import ssl
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from horovod.base.seats import Seats, peer_of

MOST_PACKET_BYTES: Final = 1 << 16
DONE: Final = b"done"
_HELLO_TIMEOUT_S: Final = 10.0
_MOST_UNPROVEN: Final = 64
_MOST_UNPROVEN_OF_PEER: Final = 16
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = hashlib.sha256().digest_size
_BUFFER_BYTES: Final = 1 << 20
# A host that is gone answers nothing. gRPC within would wait for it without end.
_GONE_AFTER_S: Final = 60


class StrangerError(Exception):
    """The other side did not prove the key; the text says so for a person."""


@dataclass
class Service:
    """One service: its key, and where the relays of its servers are, as far as that is known yet."""

    key: bytes
    timeout_s: float
    addresses: dict[str, asyncio.Future[tuple[str, int]]] = field(default_factory=dict)

    def address(self, name: str) -> asyncio.Future[tuple[str, int]]:
        if name not in self.addresses:
            self.addresses[name] = asyncio.get_running_loop().create_future()
        return self.addresses[name]

    def proof(self, side: bytes, name: str, nonces: bytes, certificate: bytes) -> bytes:
        """HMAC by which one side shows the key for a server's name and a certificate in DER."""
        seen = hashlib.sha256(certificate).digest()
        return hmac.digest(self.key, b"horovod tf.data " + side + b"\0" + nonces + seen + name.encode(), "sha256")


@dataclass(frozen=True)
class Served:
    """A server of TensorFlow's in the process that started this one. Its fence lets `guard_port` pass alone."""

    service: Service
    name: str
    tls: ssl.SSLContext
    certificate: bytes
    guard_port: int
    port: int


class Relay:
    """Both directions, and what it has been told."""

    def __init__(self) -> None:
        self._services: dict[str, Service] = {}
        self._made = 0  # local connections
        self._tasks: set[asyncio.Task[None]] = set()
        # Port of TensorFlow's server -> tasks that serve its connections.
        self._serving: dict[int, list[asyncio.Task[None]]] = {}
        self._unproven: Seats[asyncio.Task[None]] = Seats(_MOST_UNPROVEN, _MOST_UNPROVEN_OF_PEER)
        self._said: set[str] = set()
        self._client_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._client_tls.minimum_version = ssl.TLSVersion.TLSv1_3
        self._client_tls.check_hostname = False  # the proof is made over the certificate, so no authority is asked
        self._client_tls.verify_mode = ssl.CERT_NONE

    def obey(self, order: dict[str, Any], descriptors: list[int]) -> None:
        """One order of the process that started this one."""
        match order["order"]:
            case "service":
                self._services[order["id"]] = Service(bytes.fromhex(order["key"]), float(order["timeout_s"]))
            case "connect":  # TensorFlow will connect to this socket to reach the server of that name
                listener = socket.socket(fileno=descriptors[0])
                self._start(self._accept_local(listener, self._services[order["id"]], order["name"]))
            case "address":
                service, name = self._services[order["id"]], order["name"]
                if service.address(name).done():  # another server has taken the place of that one
                    del service.addresses[name]
                service.address(name).set_result((order["host"], int(order["port"])))
            case "serve":
                listener, fence = (socket.socket(fileno=descriptor) for descriptor in descriptors)
                tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                tls.minimum_version = ssl.TLSVersion.TLSv1_3
                tls.load_cert_chain(order["certificate"], order["private_key"])
                with open(order["certificate"]) as file:
                    der = ssl.PEM_cert_to_DER_cert(_first_certificate(file.read()))
                served = Served(
                    self._services[order["id"]], order["name"], tls, der, order["guard_port"], order["port"]
                )
                self._serving[order["port"]] = [
                    self._start(self._accept_peers(listener, served)),
                    self._start(self._turn_away(fence)),
                ]
            case "stop":
                for task in self._serving.pop(order["port"], ()):
                    task.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _turn_away(self, fence: socket.socket) -> None:
        """Ends the connections that somebody else than a relay has made to the port of TensorFlow's server."""
        with fence:
            while True:
                (await _accepted(fence)).close()

    async def _accept_local(self, listener: socket.socket, service: Service, name: str) -> None:
        with listener:
            while True:
                self._start(self._outward(await _accepted(listener), service, name))

    async def _outward(self, own: socket.socket, service: Service, name: str) -> None:
        reader, writer = await _streams(own)
        writers = [writer]
        try:
            address = await asyncio.wait_for(asyncio.shield(service.address(name)), service.timeout_s)
            try:
                hello = self._hello_to(address, service, name)
                from_peer, to_peer = await asyncio.wait_for(hello, _HELLO_TIMEOUT_S)
            except (OSError, EOFError, StrangerError, asyncio.TimeoutError) as error:
                self._say(f"{name} at {address[0]}:{address[1]} can't be used: {error or 'it does not answer'}")
                return
            writers.append(to_peer)
            await _pass_on(reader, writer, from_peer, to_peer)
        except (OSError, asyncio.TimeoutError):
            pass  # TensorFlow sees its connection end, and tries again as long as it likes
        finally:
            for one in writers:
                one.close()

    async def _hello_to(self, address: tuple[str, int], service: Service, name: str) -> _Streams:
        reader, writer = await asyncio.open_connection(*address, ssl=self._client_tls, limit=_BUFFER_BYTES)
        try:
            await _prove_connecting(service, name, reader, writer)
            _end_when_gone(writer)
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def _accept_peers(self, listener: socket.socket, served: Served) -> None:
        with listener:
            while True:
                peer = await _accepted(listener)
                task = self._start(self._inward(peer, served))
                try:
                    address = peer_of(peer.getpeername()[0])
                except OSError:  # the connection is gone already
                    address = ""
                if (going := self._unproven.take(address, task)) is not None:
                    going.cancel()
                task.add_done_callback(self._unproven.leave)

    async def _inward(self, connection: socket.socket, served: Served) -> None:
        writers: list[asyncio.StreamWriter] = []
        try:
            from_peer, to_peer = await asyncio.wait_for(_hello_of(connection, served), _HELLO_TIMEOUT_S)
            writers.append(to_peer)
            task = asyncio.current_task()
            assert task is not None
            self._unproven.leave(task)
            reader, writer = await _streams(await self._to_server(served))
            writers.append(writer)
            await _pass_on(from_peer, to_peer, reader, writer)
        except (OSError, EOFError, StrangerError, asyncio.TimeoutError):
            pass  # a process without the key is told nothing
        finally:
            for one in writers:
                one.close()

    async def _to_server(self, served: Served) -> socket.socket:
        """A connection to TensorFlow's server. All have one source port, and each a source address of its own."""
        self._made = self._made % 0x3FFFFF + 1
        source = f"127.{64 + (self._made >> 16)}.{self._made >> 8 & 255}.{self._made & 255}"
        connection = socket.socket()
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            connection.bind((source, served.guard_port))
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", served.port))
        except BaseException:
            connection.close()
            raise
        return connection

    def _say(self, problem: str) -> None:
        """Once: TensorFlow tries again several times in each second."""
        if problem not in self._said and len(self._said) < 100:
            self._said.add(problem)
            print(f"Horovod's relay of a tf.data service: {problem}", file=sys.stderr, flush=True)


_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _hello_of(connection: socket.socket, served: Served) -> _Streams:
    reader, writer = await _streams(connection, served.tls)
    try:
        await _prove_listening(served, reader, writer)
        _end_when_gone(writer)
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def _prove_connecting(
    service: Service, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    nonces = await reader.readexactly(_NONCE_BYTES) + (own := secrets.token_bytes(_NONCE_BYTES))
    writer.write(own + service.proof(b"connecting", name, nonces, certificate))
    answer = await reader.readexactly(_PROOF_BYTES)
    if not hmac.compare_digest(answer, service.proof(b"listening", name, nonces, certificate)):
        raise StrangerError("it does not know the key of the service")


async def _prove_listening(served: Served, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(own := secrets.token_bytes(_NONCE_BYTES))
    nonces = own + await reader.readexactly(_NONCE_BYTES)
    of_peer = await reader.readexactly(_PROOF_BYTES)
    service, name = served.service, served.name
    if not hmac.compare_digest(of_peer, service.proof(b"connecting", name, nonces, served.certificate)):
        raise StrangerError("it does not know the key of the service")
    writer.write(service.proof(b"listening", name, nonces, served.certificate))


async def _pass_on(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
) -> None:
    """Both directions, until one of them ends."""
    copies = [
        asyncio.ensure_future(_copy(reader, other_writer)),
        asyncio.ensure_future(_copy(other_reader, writer)),
    ]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in copies:
            one.cancel()
        await asyncio.gather(*copies, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_BUFFER_BYTES):
        writer.write(data)
        await writer.drain()


async def _accepted(listener: socket.socket) -> socket.socket:
    """The next connection. A host without descriptors makes this wait, and not end."""
    listener.setblocking(False)
    while True:
        try:
            return (await asyncio.get_running_loop().sock_accept(listener))[0]
        except OSError:
            await asyncio.sleep(0.1)


async def _streams(connection: socket.socket, tls: ssl.SSLContext | None = None) -> _Streams:
    """Of an accepted connection; the TLS handshake of a server is done on the way."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    reader = asyncio.StreamReader(limit=_BUFFER_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _end_when_gone(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _GONE_AFTER_S // 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _GONE_AFTER_S // 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_AFTER_S * 1000)


def _first_certificate(pem: str) -> str:
    end = "-----END CERTIFICATE-----"
    return pem[pem.index("-----BEGIN CERTIFICATE-----") : pem.index(end) + len(end)]


async def _main(orders: socket.socket) -> None:
    relay = Relay()
    ended = asyncio.Event()

    def order_came() -> None:
        packet, descriptors, _, _ = socket.recv_fds(orders, MOST_PACKET_BYTES, 8)
        if not packet:
            ended.set()
            return
        try:
            relay.obey(json.loads(packet), descriptors)
        except (OSError, ValueError, KeyError) as error:  # ssl.SSLError is an OSError
            orders.send(f"{type(error).__name__}: {error}".encode())
        else:
            orders.send(DONE)

    asyncio.get_running_loop().add_reader(orders, order_came)
    await ended.wait()


def main(folder: str) -> None:
    """The process that started this one ends it, so a signal for the whole group does not."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        with socket.socket(fileno=0) as orders:
            asyncio.run(_main(orders))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
