"""Starts processes in milliseconds: a process that has imported what they need, and forks for each request.

    python fork_server.py FD MODULE     the server: MODULE imports all that its children need, and has
                                        forked(descriptors, *arguments), which is what a child does; where it has
                                        STOPS_ITS_THREADS, what it imports stops its threads around a fork

The server has no other thread and nothing open, so its children are what a fresh interpreter would be after its
imports: each is a process of its own, with the environment and the descriptors of the request, and ends through the
interpreter's ordinary exit. Tests of what comes before that (how a command, a path or an interpreter is found) start
processes anew. Its parent is the server, which reaps it when asked to. The server ends when the process that made it is
gone.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
_MAX_BYTES = 1 << 20
_MAX_DESCRIPTORS = 16


def _folders_of_tests() -> list[str]:
    """Where the tests find their modules and benchmarks, which the children may import as well."""
    return [
        folder for folder in sys.path if TESTS.parent == Path(folder) or TESTS in (Path(folder), *Path(folder).parents)
    ]


class Forked:
    """A child of a server."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self._code is None:
            descriptor = os.pidfd_open(self.pid)  # not reaped before the server is asked
            try:
                if select.select([descriptor], [], [], timeout_s)[0]:
                    self._code = self._server.ask("reap", self.pid)
            finally:
                os.close(descriptor)
        return self._code

    def send_signal(self, signum: int) -> None:
        if self._code is None:
            os.kill(self.pid, signum)


class ForkServer:
    """The tests' side. One at a time asks."""

    def __init__(self, module: str, prefix: Sequence[str] = (), python: str = sys.executable) -> None:
        """prefix: of the command, for a namespace. python: of another environment."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*prefix, python, str(TESTS / "fork_server.py"), str(theirs.fileno()), module],
                env={name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
                | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(_folders_of_tests())},
                pass_fds=[theirs.fileno()],
            )

    def start(self, environment: Mapping[str, str], descriptors: Sequence[int], *arguments: Any) -> Forked:
        """A child with this environment that calls forked() with descriptors of its own for these."""
        return Forked(self, self.ask("start", dict(environment), *arguments, descriptors=descriptors))

    def ask(self, *request: object, descriptors: Sequence[int] = ()) -> int:
        socket.send_fds(self._socket, [pickle.dumps(request)], list(descriptors))
        answer = self._socket.recv(_MAX_BYTES)
        assert answer, f"the fork server ended with {self._process.wait()}"
        number: int = pickle.loads(answer)
        return number

    def close(self) -> None:
        self._socket.close()
        self._process.wait(60)


@functools.cache
def shared(module: str, python: str = sys.executable) -> ForkServer:
    """That of this process for `module`."""
    server = ForkServer(module, python=python)
    atexit.register(server.close)
    return server


def _serve(connection: socket.socket, stops_threads: bool) -> tuple[list[int], tuple[Any, ...]] | None:
    """Returns None at the end, and in each child what forked() is to get."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, _MAX_BYTES, _MAX_DESCRIPTORS)
        if not data:
            return None
        match pickle.loads(data):
            case "start", environment, *arguments:
                threads = len(os.listdir("/proc/self/task"))
                assert threads == 1 or stops_threads, "what the server has imported has started a thread"
                pid = os.fork()
                if pid == 0:
                    connection.close()
                    os.environ.clear()
                    os.environ.update(environment)
                    # As in an interpreter that is not started in the background of a shell, wherever the tests run.
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    return descriptors, tuple(arguments)
                for descriptor in descriptors:
                    os.close(descriptor)
                answer = pid
            case "reap", pid:
                answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.send(pickle.dumps(answer))


if __name__ == "__main__":
    # Its allocator starts a thread. Keras imports pandas, which does without it.
    sys.modules["pyarrow"] = None  # type: ignore[assignment]
    preloaded = importlib.import_module(sys.argv[2])
    del sys.modules["pyarrow"]
    gc.freeze()  # the children neither copy nor search what all of them share
    served = _serve(socket.socket(fileno=int(sys.argv[1])), getattr(preloaded, "STOPS_ITS_THREADS", False))
    if served is not None:
        preloaded.forked(served[0], *served[1])
