"""Where the processes of a tf.data service find each other: who waits for a dispatcher or its workers is told here.

One line of JSON each way on a connection of its own, after a challenge:

    service: {"challenge": C}    client: {"request": R, "proof": HMAC(key, C, R)}    service: {"reply": A, "proof": ...}

A service that is gone ends all waiting with ConnectionError. A connection without a proof takes a seat from others of
its kind only (base/seats.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from horovod.base.errors import TrainingCode, coded
from horovod.base.seats import Seats, peer_of

Address = tuple[str, int]

_HELLO_TIMEOUT_S: Final = 10.0
_MOST_BYTES: Final = 1 << 16
_MOST_UNPROVEN: Final = 64  # connections at a time, each of which takes a thread
_MOST_UNPROVEN_OF_PEER: Final = 32


class Board:
    """What has been registered so far; waiting for it has a deadline."""

    def __init__(self, workers_per_dispatcher: int) -> None:
        self._workers_per_dispatcher = workers_per_dispatcher
        self._changed = threading.Condition()
        self._dispatchers: dict[int, str] = {}
        # Dispatcher -> number of a worker, as text, since JSON has no other keys -> its address.
        self._workers: dict[int, dict[str, str]] = {}
        self._ended = False

    def answer(self, request: dict[str, Any]) -> Any:
        """The reply to a request. Raises TimeoutError and ValueError."""
        kind, index = request["kind"], request.get("dispatcher", 0)
        with self._changed:
            match kind:
                case "dispatcher":
                    self._dispatchers[index] = request["address"]
                case "worker":
                    self._workers.setdefault(index, {})[str(request["worker"])] = request.get("address", "")
                case "shutdown":
                    self._ended = True
                case "wait for dispatcher":
                    self._wait(lambda: index in self._dispatchers, request, f"dispatcher {index}")
                    return self._dispatchers[index]
                case "wait for workers":
                    wanted = self._workers_per_dispatcher
                    self._wait(
                        lambda: len(self._workers.get(index, ())) >= wanted,
                        request,
                        f"all {wanted} workers of dispatcher {index} (there are {len(self._workers.get(index, ()))})",
                    )
                    return self._workers.get(index, {})
                case "wait for shutdown":
                    self._changed.wait_for(lambda: self._ended)
                case _:
                    raise ValueError(f"unknown request {kind!r}")
            self._changed.notify_all()
        return None

    def _wait(self, there: Any, request: dict[str, Any], what: str) -> None:
        timeout_s = float(request["timeout"])
        if not self._changed.wait_for(lambda: there() or self._ended, timeout_s):
            raise TimeoutError(
                coded(
                    TrainingCode.DATA_SERVICE_INCOMPLETE,
                    f"The tf.data service has waited {timeout_s:g} s for {what}. Are all processes running?",
                )
            )
        if not there():
            raise TimeoutError(
                coded(
                    TrainingCode.DATA_SERVICE_UNREACHABLE,
                    f"The tf.data service was shut down while waiting for {what}.",
                )
            )


class Service:
    """Runs in a thread from the beginning; `close` ends it."""

    def __init__(self, key: bytes, workers_per_dispatcher: int) -> None:
        board = Board(workers_per_dispatcher)

        class Handler(socketserver.StreamRequestHandler):
            timeout = _HELLO_TIMEOUT_S

            def handle(self) -> None:
                challenge = secrets.token_hex(16)
                self._send({"challenge": challenge})
                message = json.loads(self.rfile.readline(_MOST_BYTES) or b"{}")
                request = message.get("request", "")
                if not hmac.compare_digest(message.get("proof", ""), _proof(key, challenge, request)):
                    return
                server.leave(self.connection)
                self.connection.settimeout(None)  # no deadline here: the other side has one
                try:
                    reply = {"value": board.answer(json.loads(request))}
                except (TimeoutError, ValueError) as error:
                    reply = {"error": str(error)}
                text = json.dumps(reply)
                self._send({"reply": text, "proof": _proof(key, challenge + "reply", text)})

            def _send(self, message: dict[str, str]) -> None:
                self.wfile.write(json.dumps(message).encode() + b"\n")

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128  # five would make honest processes wait for seconds behind a few strangers
            seats: Seats[socket.socket] = Seats(_MOST_UNPROVEN, _MOST_UNPROVEN_OF_PEER)
            lock = threading.Lock()

            def process_request(self, request: Any, client_address: Any) -> None:
                with self.lock:
                    going = self.seats.take(peer_of(client_address[0]), request)
                if going is not None:
                    with contextlib.suppress(OSError):
                        going.shutdown(socket.SHUT_RDWR)  # the connection's thread ends it
                super().process_request(request, client_address)

            def leave(self, connection: socket.socket) -> None:
                with self.lock:
                    self.seats.leave(connection)

            def shutdown_request(self, request: Any) -> None:
                self.leave(request)
                super().shutdown_request(request)

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that is gone, or is none: it learns nothing, and this side goes on."""

        self._board = board
        self._server = server = Server(("", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="tf-data-rendezvous", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> list[Address]:
        """Where it may be reached, most likely first."""
        port = self._server.server_address[1]
        return [(host, port) for host in dict.fromkeys([host_address(), "127.0.0.1"])]

    def close(self) -> None:
        self._board.answer({"kind": "shutdown"})
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Client:
    """Asks a Service. verbose: 2 prints what is asked."""

    def __init__(self, addresses: Sequence[Address], key: bytes, timeout_s: float, verbose: int = 1) -> None:
        self._addresses = [(str(host), int(port)) for host, port in addresses]
        self._key = key
        self._timeout_s = timeout_s
        self._verbose = verbose

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """A dispatcher listens there."""
        self._ask(kind="dispatcher", dispatcher=dispatcher_id, address=dispatcher_address)

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float | None = None) -> str:
        """The dispatcher's address, once it is registered. Raises TimeoutError."""
        return str(self._ask(timeout, kind="wait for dispatcher", dispatcher=dispatcher_id))

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int, worker_address: str = "") -> None:
        """A worker of a dispatcher is ready; its relay listens there."""
        self._ask(kind="worker", dispatcher=dispatcher_id, worker=worker_id, address=worker_address)

    def wait_for_dispatcher_worker_registration(
        self, dispatcher_id: int, timeout: float | None = None
    ) -> dict[int, str]:
        """Returns when all workers of a dispatcher are ready: their addresses, by number. Raises TimeoutError."""
        found = self._ask(timeout, kind="wait for workers", dispatcher=dispatcher_id)
        return {int(worker): str(address) for worker, address in found.items()}

    def wait_for_shutdown(self) -> None:
        """Returns when somebody calls `shutdown`; ConnectionError when the service is gone."""
        self._ask(kind="wait for shutdown", unlimited=True)

    def shutdown(self) -> None:
        """Ends the service and its workers."""
        self._ask(kind="shutdown")

    def _ask(self, timeout: float | None = None, *, unlimited: bool = False, **request: Any) -> Any:
        timeout_s = self._timeout_s if timeout is None else timeout
        if self._verbose > 1:
            print(f"tf.data service: {request}", flush=True)
        with self._connect() as connection, connection.makefile("rb") as lines:
            challenge = json.loads(lines.readline(_MOST_BYTES) or b"{}").get("challenge", "")
            text = json.dumps(request | {"timeout": timeout_s})
            message = {"request": text, "proof": _proof(self._key, challenge, text)}
            connection.settimeout(None if unlimited else timeout_s + _HELLO_TIMEOUT_S)
            connection.sendall(json.dumps(message).encode() + b"\n")
            answer = json.loads(lines.readline(_MOST_BYTES) or b"{}")
        reply = answer.get("reply", "")
        if not hmac.compare_digest(answer.get("proof", ""), _proof(self._key, challenge + "reply", reply)):
            raise ConnectionError(
                coded(
                    TrainingCode.DATA_SERVICE_UNREACHABLE,
                    f"The tf.data service at {self._addresses[0]} has ended, or refused the key. Use the configuration "
                    "that its job has written.",
                )
            )
        found = json.loads(reply)
        if "error" in found:
            raise TimeoutError(found["error"])
        return found["value"]

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + self._timeout_s
        while True:
            for address in self._addresses:
                try:
                    return socket.create_connection(address, min(_HELLO_TIMEOUT_S, self._timeout_s))
                except OSError as error:
                    problem = error
            if isinstance(problem, ConnectionRefusedError) or time.monotonic() > deadline:
                raise ConnectionError(
                    coded(
                        TrainingCode.DATA_SERVICE_UNREACHABLE,
                        f"No tf.data service listens at any of {self._addresses}: {problem}",
                    )
                ) from problem


def host_address() -> str:
    """The address of this host by which others reach it."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    except OSError:
        return "127.0.0.1"
    return next(iter(sorted(one for one in found if not one.startswith("127."))), "127.0.0.1")


def _proof(key: bytes, challenge: str, text: str) -> str:
    return hmac.new(key, f"{challenge}\n{text}".encode(), hashlib.sha256).hexdigest()
