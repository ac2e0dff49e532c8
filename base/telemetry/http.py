"""An HTTP/1.1 server of a few dozen lines on asyncio, for pages that people and probes read: GET and HEAD only.

No framework: aiohttp brings seven packages, and http.server a thread for each reader. One answer for each connection,
which is then closed. An error of a page is in the log with its traceback and the reader gets a status without it.

Probes decide by these pages whether a process lives, so nobody may keep them from an answer: a connection has HEAD_S,
TLS included, to say what it wants, and when MAX_READERS are connected a newcomer takes the seat of one that says
nothing (base/seats.py). It is refused in no case.

Other pages ask for a token. Programs send it as a bearer token; a browser opens `/?token=TOKEN` once, gets a cookie for
it, and is sent on to the page, so that the token stays in no address bar. On loopback the Host of a request must be an
address or `localhost` as well: a page of the Internet whose name somebody points at 127.0.0.1 (DNS rebinding) sends its
own name there.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, unquote

from horovod.base.errors import AccessCode, coded
from horovod.base.seats import Seats, peer_of
from horovod.base.tasks import end_tasks

MAX_REQUEST_BYTES = 16 << 10
HEAD_S = 1.0  # seconds for the handshake of TLS and the head of a request together
ANSWER_S = 10.0  # seconds until the reader has the answer
MAX_READERS = 64
MAX_READERS_OF_PEER = 16
# Seconds until the next attempt, after the system could not accept a connection, as without free file descriptors.
ACCEPT_AGAIN_S = 0.2
_LINK = "token="
_NO_TOKEN = coded(
    AccessCode.WRONG_TOKEN,
    "This page asks for a token. In a browser open the link that was printed when its program started, or add "
    "?token=TOKEN to the address; a program sends the header Authorization: Bearer TOKEN.",
)
_OTHER_HOST = coded(
    AccessCode.OTHER_HOST_NAME,
    "This page is for this host only, and the request names another one (its header Host). Use localhost or 127.0.0.1.",
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    text: str
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"
    headers: Sequence[tuple[str, str]] = ()


Page = Callable[[], Awaitable[Answer]]


class WebServer:
    """token: readers of pages that are not in `open_pages` show it, as this module says; None: none is needed.
    host_names: what a request for these pages may name as its Host, beside any address; None: anything.
    """

    def __init__(
        self,
        pages: Mapping[str, Page],
        token: str | None = None,
        open_pages: frozenset[str] = frozenset(),
        host_names: frozenset[str] | None = None,
    ) -> None:
        self._pages = dict(pages)
        self._token = token
        self._open_pages = open_pages
        self._host_names = host_names
        self._cookie_name = ""
        self._tls: ssl.SSLContext | None = None
        self._listening: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._readers: set[asyncio.Task[None]] = set()
        self._seats: Seats[asyncio.Task[None]] = Seats(MAX_READERS, MAX_READERS_OF_PEER)

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """The port. tls: for HTTPS. OSError when it can't listen there."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, address in dict.fromkeys((entry[0], str(entry[4][0])) for entry in found):
                listening = socket.create_server((address, port), family=family)
                self._listening.append(listening)
                listening.setblocking(False)
                port = int(listening.getsockname()[1])
        except OSError:
            self._close_listening()
            raise
        self._tls = tls
        self._cookie_name = f"horovod-{port}"  # browsers send one server's cookies to all ports of its host
        self._accepting = [loop.create_task(self._accept(one)) for one in self._listening]
        return port

    async def stop(self) -> None:
        await end_tasks(self._accepting)
        self._close_listening()
        await end_tasks(self._readers)

    def _close_listening(self) -> None:
        for one in self._listening:
            one.close()
        self._listening.clear()

    async def _accept(self, listening: socket.socket) -> None:
        """For ever. One connection in each turn of the event loop, whose other tasks go on while strangers connect."""
        loop, is_told = asyncio.get_running_loop(), False
        while True:
            try:
                connection, (address, *_) = await loop.sock_accept(listening)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if not is_told:
                    _log.warning("No page can be shown: accepting a connection failed: %s.", error.strerror or error)
                is_told = True
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            is_told = False
            reader = loop.create_task(self._serve(connection))
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)
            reader.add_done_callback(self._seats.leave)
            reader.add_done_callback(lambda _, connection=connection: connection.close())  # type: ignore[misc]
            if (going := self._seats.take(peer_of(address), reader)) is not None:
                going.cancel()
            await asyncio.sleep(0)

    async def _serve(self, connection: socket.socket) -> None:
        writers: list[asyncio.StreamWriter] = []
        try:
            head = await asyncio.wait_for(self._head(connection, writers), HEAD_S)
            if (reader := asyncio.current_task()) is not None:
                self._seats.spoke(reader)
            await asyncio.wait_for(self._converse(head, writers[0]), ANSWER_S)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass  # the reader went away, or is too slow
        finally:
            for writer in writers:
                writer.transport.abort()

    async def _head(self, connection: socket.socket, writers: list[asyncio.StreamWriter]) -> bytes | None:
        """The head of the request; None if it is too long. The way to the reader is put into `writers`."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MAX_REQUEST_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        patience: dict[str, Any] = {} if self._tls is None else {"ssl_handshake_timeout": HEAD_S}
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls, **patience)
        writers.append(asyncio.StreamWriter(transport, protocol, reader, loop))
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return None

    async def _converse(self, head: bytes | None, writer: asyncio.StreamWriter) -> None:
        lines = (head or b"").decode("latin-1").split("\r\n")
        try:
            method, target, _version = lines[0].split(" ")
        except ValueError:
            method, answer = "GET", _refusal(HTTPStatus.BAD_REQUEST)
        else:
            path, _, query = target.partition("?")
            answer = await self._answer(method, path, query, _headers(lines[1:]))
        body = answer.text.encode()
        more = "".join(f"{name}: {value}\r\n" for name, value in answer.headers)
        writer.write(
            f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
            f"Content-Type: {answer.content_type}\r\nContent-Length: {len(body)}\r\nCache-Control: no-store\r\n"
            "X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\nReferrer-Policy: no-referrer\r\n"
            f"{more}Connection: close\r\n\r\n".encode("latin-1")
        )
        if method != "HEAD":
            writer.write(body)
        writer.close()
        await writer.wait_closed()

    async def _answer(self, method: str, path: str, query: str, headers: Mapping[str, str]) -> Answer:
        if path not in self._pages:
            return _refusal(HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED)
        if path not in self._open_pages and (instead := self._instead(path, query, headers)) is not None:
            return instead
        try:
            return await self._pages[path]()
        except Exception:
            _log.exception("A bug: the page %s can't be made. Please report it.", path)
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR)

    def _instead(self, path: str, query: str, headers: Mapping[str, str]) -> Answer | None:
        """What somebody gets who may not see the page yet; None: who may."""
        if self._host_names is not None and not _names_one_of(self._host_names, headers.get("host", "")):
            return Answer(f"{_OTHER_HOST}\n", HTTPStatus.MISDIRECTED_REQUEST)
        if self._token is None or _equal(headers.get("authorization", ""), f"Bearer {self._token}"):
            return None
        # Somebody who reads the cookie can open these pages, but does not learn the token.
        cookie = hmac.new(self._token.encode(), b"horovod pages", hashlib.sha256).hexdigest()
        if query.startswith(_LINK) and _equal(unquote(query.removeprefix(_LINK)), self._token):
            secure = "; Secure" if self._tls is not None else ""
            # Lax, not Strict: a link in a terminal that is itself a web page (a notebook's) is to work.
            kept = f"{self._cookie_name}={cookie}; Path=/; HttpOnly; SameSite=Lax{secure}"
            return Answer("", HTTPStatus.SEE_OTHER, headers=(("Location", path), ("Set-Cookie", kept)))
        if any(_equal(one.strip(), f"{self._cookie_name}={cookie}") for one in headers.get("cookie", "").split(";")):
            return None
        return Answer(f"{_NO_TOKEN}\n", HTTPStatus.UNAUTHORIZED, headers=(("WWW-Authenticate", "Bearer"),))


def link_of(address: str, token: str) -> str:
    """For a browser: http://127.0.0.1:9400/?token=TOKEN."""
    return f"{address}/?{_LINK}{quote(token, safe='')}"


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _names_one_of(host_names: frozenset[str], given: str) -> bool:
    """given: the header Host, as "127.0.0.1:9400", "[::1]" or "localhost:9400"."""
    host = given[1:].partition("]")[0] if given.startswith("[") else given.partition(":")[0]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host.lower().rstrip(".") in host_names
    return True


def _headers(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _refusal(status: HTTPStatus) -> Answer:
    return Answer(f"{status.phrase}\n", status)
