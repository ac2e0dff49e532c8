"""A TCP proxy whose connections a test can break in the ways that networks do; members reach a coordinator by it."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from types import TracebackType


class Proxy:
    """One thread carries bytes both ways."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._wake, self._woken = socket.socketpair()
        self.answered_bytes = 0  # that came from the coordinator; written by the proxy's thread
        self.seen: bytearray | None = None  # all bytes of both directions; None: they are not kept
        self.alters = False  # the last bit of whatever comes, in both directions
        self._lock = threading.Lock()  # guards the five below
        self._other: dict[socket.socket, socket.socket] = {}
        self._far: set[socket.socket] = set()  # those to the coordinator
        self._muted: set[socket.socket] = set()
        self._closed = False
        self._refusing = False
        self._thread = threading.Thread(target=self._run, name="proxy")

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
        self._wake.send(b"x")
        self._thread.join()
        self.cut()
        for one in (self._listener, self._wake, self._woken):
            one.close()

    def cut(self) -> int:
        """Resets every connection; how many there were."""
        with self._lock:
            count = len(self._other) // 2
            for one in list(self._other):
                self._drop(one, reset=True)
        return count

    def refuse(self) -> None:
        """Accepts no connection any more, and resets those that there are."""
        with self._lock:
            self._refusing = True
        self.cut()
        self._wake.send(b"x")

    def admit(self) -> None:
        """Takes back `refuse`."""
        with self._lock:
            self._refusing = False

    def mute(self, answers_only: bool = False) -> int:
        """Nothing (or no answer) gets through on the connections that there are, unnoticed; new ones work."""
        with self._lock:
            self._muted |= self._far if answers_only else set(self._other)
            count = len(self._other) // 2
        self._wake.send(b"x")
        return count

    def _drop(self, one: socket.socket, reset: bool) -> None:
        other = self._other.pop(one, None)
        for end in (one, other):
            if end is None:
                continue
            self._other.pop(end, None)
            self._muted.discard(end)
            self._far.discard(end)
            if reset:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                live = [one for one in self._other if one not in self._muted]
            with contextlib.suppress(ValueError, OSError):  # cut() closed one meanwhile
                ready, _, _ = select.select([self._listener, self._woken, *live], [], [], 1.0)
                for one in ready:
                    self._serve(one)

    def _serve(self, one: socket.socket) -> None:
        if one is self._woken:
            one.recv(4096)
            return
        if one is self._listener:
            near, _ = one.accept()
            with self._lock:
                if self._refusing:
                    near.close()
                    return
                far = socket.create_connection(self._target)
                self._other[near], self._other[far] = far, near
                self._far.add(far)
            return
        with self._lock:
            if (other := self._other.get(one)) is None or one in self._muted:
                return
            try:
                data = one.recv(1 << 16)
                if one in self._far:
                    self.answered_bytes += len(data)
                if self.seen is not None:
                    self.seen += data
                if data and self.alters:
                    data = data[:-1] + bytes([data[-1] ^ 1])
                other.sendall(data)
            except OSError:
                data = b""
            if not data:
                self._drop(one, reset=False)
