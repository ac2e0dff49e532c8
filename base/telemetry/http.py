"""An HTTP/1.1 server of a few dozen lines on asyncio, for pages that people and probes read: GET and HEAD only.

No framework: aiohttp brings seven packages, and http.server a thread for each reader. One answer for each connection,
which is then closed; a request has a limit of bytes and of seconds, and at most MAX_READERS are served at a time. An
error of a page is in the log with its traceback and the reader gets a status without it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

MAX_REQUEST_BYTES = 16 << 10
REQUEST_S = 10.0
MAX_READERS = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    text: str
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"


Page = Callable[[], Awaitable[Answer]]


class WebServer:
    """token: readers of pages that are not in `open_pages` send `Authorization: Bearer TOKEN`; None: none is needed."""

    def __init__(
        self, pages: Mapping[str, Page], token: str | None = None, open_pages: frozenset[str] = frozenset()
    ) -> None:
        self._pages = dict(pages)
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._open_pages = open_pages
        self._server: asyncio.Server | None = None
        self._readers: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """The port. tls: for HTTPS. OSError when it can't listen there."""
        patience = {} if tls is None else {"ssl_handshake_timeout": REQUEST_S}
        self._server = await asyncio.start_server(self._begin, host, port, limit=MAX_REQUEST_BYTES, ssl=tls, **patience)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for reader in self._readers:
                reader.cancel()
            await asyncio.gather(*self._readers, return_exceptions=True)
            self._server = None

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._readers) >= MAX_READERS:
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.wait_for(self._converse(reader, writer), REQUEST_S)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass  # the reader went away, or is too slow
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, target, _version = head[0].split(" ")
        except (ValueError, asyncio.LimitOverrunError):
            method, answer = "GET", _refusal(HTTPStatus.BAD_REQUEST)
        else:
            answer = await self._answer(method, target.partition("?")[0], _headers(head[1:]))
        body = answer.text.encode()
        more = "WWW-Authenticate: Bearer\r\n" if answer.status is HTTPStatus.UNAUTHORIZED else ""
        writer.write(
            f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
            f"Content-Type: {answer.content_type}\r\nContent-Length: {len(body)}\r\nCache-Control: no-store\r\n"
            f"X-Content-Type-Options: nosniff\r\n{more}Connection: close\r\n\r\n".encode("latin-1")
        )
        if method != "HEAD":
            writer.write(body)
        await writer.drain()

    async def _answer(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if path not in self._pages:
            return _refusal(HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED)
        if self._expected is not None and path not in self._open_pages:
            given = headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._expected):
                return _refusal(HTTPStatus.UNAUTHORIZED)
        try:
            return await self._pages[path]()
        except Exception:
            _log.exception("A bug: the page %s can't be made. Please report it.", path)
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR)


def _headers(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _refusal(status: HTTPStatus) -> Answer:
    return Answer(f"{status.phrase}\n", status)
