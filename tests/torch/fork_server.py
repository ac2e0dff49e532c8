"""Starts ranks in milliseconds: a process that has imported a framework and Horovod for it and forks for each request.

It has no other thread and no world, so its children are what a fresh interpreter would be after its imports; they end
through the interpreter's ordinary exit. The server ends when the process that made it is gone.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import pickle
import select
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

HERE = Path(__file__).parent
_MAX_BYTES = 1 << 20


def _folders_of_tests() -> list[str]:
    """Where the tests find their modules and benchmarks, which the ranks import as well."""
    tests = HERE.parent
    return [
        folder for folder in sys.path if tests.parent == Path(folder) or tests in (Path(folder), *Path(folder).parents)
    ]


class Forked:
    """A child of the server."""

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

    def __init__(self, framework: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "fork_server.py"), str(theirs.fileno()), framework],
                env={name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
                | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(_folders_of_tests())},
                pass_fds=[theirs.fileno()],
            )

    def start(self, environment: dict[str, str], pipe: int) -> Forked:
        """A process with this environment that serves functions from `pipe`; see worlds.py."""
        return Forked(self, self.ask("start", environment, pipe=pipe))

    def ask(self, *request: object, pipe: int | None = None) -> int:
        socket.send_fds(self._socket, [pickle.dumps(request)], [] if pipe is None else [pipe])
        answer = self._socket.recv(_MAX_BYTES)
        assert answer, f"the fork server ended with {self._process.wait()}"
        number: int = pickle.loads(answer)
        return number

    def close(self) -> None:
        self._socket.close()
        self._process.wait(60)


@functools.cache
def shared(framework: str) -> ForkServer:
    """That of this process for the framework."""
    server = ForkServer(framework)
    atexit.register(server.close)
    return server


def _serve(connection: socket.socket) -> Connection | None:
    """Returns None at the end, and in each child what it is to serve."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, _MAX_BYTES, 1)
        if not data:
            return None
        match pickle.loads(data):
            case "start", environment:
                pid = os.fork()
                if pid == 0:
                    connection.close()
                    os.environ.clear()
                    os.environ.update(environment)
                    return Connection(descriptors[0])
                os.close(descriptors[0])
                answer = pid
            case "reap", pid:
                answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.send(pickle.dumps(answer))


def _import_torch() -> None:
    # Whether there are GPUs must not be found out by asking CUDA, which no child could use after that.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch._dynamo  # noqa: F401  (seconds, which the first optimizer would take in each child)

    import horovod.torch  # noqa: F401


def _import_tensorflow() -> None:
    # TensorFlow starts its threads with the first operation, so children can have their own.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import horovod.tensorflow  # noqa: F401


if __name__ == "__main__":
    framework = sys.argv[2]
    {"torch": _import_torch, "tensorflow": _import_tensorflow}[framework]()
    import worlds

    gc.freeze()  # the children neither copy nor search what all of them share
    served = _serve(socket.socket(fileno=int(sys.argv[1])))
    if served is not None:
        worlds.serve(served, framework)
