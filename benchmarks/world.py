"""The ranks of one library: started once, told what to run, stopped for certain.

Each rank connects back over a Unix socket in a private directory, which also works from another network namespace. A
rank ends when that connection does, so none outlives the harness, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 120.0  # PyTorch with CUDA comes slowly from a cold disk
ANSWER_SECONDS = 120.0
_STOP_SECONDS = 5.0
# Ctrl-C is for the harness, which then stops the ranks in order. They stay in its session, see README.md.
_OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}


class WorldError(Exception):
    """The ranks of a library did not start, did not answer or said that something failed."""


@dataclass(frozen=True)
class Host:
    """Where ranks run: on this host, or (with a prefix such as `ip netns exec NAME`) on one of several."""

    name: str = ""
    address: str = "127.0.0.1"
    interface: str = "lo"
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Ranks are numbered host by host."""

    hosts: tuple[Host, ...] = (Host(),)
    ranks_per_host: int = 1
    mpi_options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.hosts) * self.ranks_per_host

    def host_of(self, rank: int) -> Host:
        return self.hosts[rank // self.ranks_per_host]


class World:
    def __init__(self, library: str, layout: Layout, worker: str = "benchmarks.worker", name: str = "") -> None:
        self.library = library
        self.name = name or library  # in tables: one library may have worlds with several settings
        self._worker = worker  # the module that a rank runs
        self.layout = layout
        self.size = layout.size
        self.version = ""
        self.pids: list[int] = []
        self._folder = tempfile.mkdtemp(prefix="horovod-benchmark-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._log = open(os.path.join(self._folder, "log"), "w+b")  # noqa: SIM115 (closed with the world)

    def __enter__(self) -> World:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- talking to the ranks --------------------------------------------------------------------------------------
    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Sends one request to every rank and returns the replies in rank order; WorldError if one failed."""
        request = json.dumps({"do": do, **arguments}).encode()
        replies: dict[Connection, dict[str, Any]] = {}
        with contextlib.suppress(OSError):  # a rank that is gone shows below
            for connection in self._connections:
                connection.send_bytes(request)
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(replies) < self.size:
            missing = [connection for connection in self._connections if connection not in replies]
            ready = wait(missing, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failure(f"did not finish {do!r} within {ANSWER_SECONDS:.0f} s")
            for connection in missing:
                if connection in ready:
                    try:
                        replies[connection] = json.loads(connection.recv_bytes())
                    except (EOFError, OSError):
                        raise self._failure(f"lost a rank during {do!r}") from None
        ordered = [replies[connection] for connection in self._connections]
        for rank, reply in enumerate(ordered):
            if "error" in reply:
                raise self._failure(f"failed on rank {rank} during {do!r}: {reply['error']}", output=False)
        return ordered

    def _failure(self, what: str, output: bool = True) -> WorldError:
        text = f"{self.name} with {self.size} ranks {what}."
        if output:
            self._log.flush()
            said = Path(self._folder, "log").read_text(errors="replace").strip()
            text += f" Its output ends:\n{said[-3000:]}" if said else " It printed nothing."
        return WorldError(text)

    # -- start and stop --------------------------------------------------------------------------------------------
    def _start(self) -> None:
        socket = os.path.join(self._folder, "socket")
        with Listener(socket, "AF_UNIX", backlog=self.size) as listener:
            for command, environment in self._commands(socket):
                self._spawn(command, environment)
            connections = self._accept(listener)
        deadline = time.monotonic() + START_SECONDS
        hellos: dict[int, tuple[Connection, dict[str, Any]]] = {}
        self._connections = connections
        for connection in connections:
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise self._failure("did not form a world in time")
            try:
                hello = json.loads(connection.recv_bytes())
            except (EOFError, OSError):
                raise self._failure("did not start") from None
            hellos[hello["rank"]] = (connection, hello)
        if sorted(hellos) != list(range(self.size)):
            raise self._failure(f"has ranks {sorted(hellos)}")
        self._connections = [hellos[rank][0] for rank in range(self.size)]
        self.pids = [hellos[rank][1]["pid"] for rank in range(self.size)]
        self.version = hellos[0][1]["version"]

    def _accept(self, listener: Listener) -> list[Connection]:
        """Accepts in a thread, so that ranks which end before they connect are noticed."""
        connections: list[Connection] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while len(connections) < self.size:
                    connections.append(listener.accept())

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        deadline = time.monotonic() + START_SECONDS
        while thread.is_alive():
            thread.join(0.1)
            ended = [process.returncode for process in self._processes if process.poll() is not None]
            if thread.is_alive() and (ended or time.monotonic() > deadline):
                raise self._failure(f"did not start (ended with {ended})" if ended else "did not start in time")
        return connections

    def _spawn(self, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "OMPI_", "PMIX_"))
        }
        process = subprocess.Popen(
            command,
            env={**clean, **environment},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            **_OWN_GROUP,
        )
        self._processes.append(process)
        return process

    def _commands(self, socket: str) -> list[tuple[list[str], dict[str, str]]]:
        worker = [sys.executable, "-m", self._worker, self.library]
        common = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
            "BENCHMARK_SOCKET": socket,
            "BENCHMARK_SIZE": str(self.size),
            "BENCHMARK_RENDEZVOUS": os.path.join(self._folder, "rendezvous"),
            **self.layout.environment,
        }
        if self.library == "mpi":
            return [(self._mpirun(worker, common), {**common, "TMPDIR": self._folder})]
        first = self._coordinator() if self.library == "horovod" else {}
        per_host = self.layout.ranks_per_host
        commands = []
        for rank in range(self.size):
            host = self.layout.host_of(rank)
            environment = {**common, **first, "BENCHMARK_RANK": str(rank)}
            environment |= {"BENCHMARK_ADDRESS": host.address, "GLOO_SOCKET_IFNAME": host.interface}
            if self.library == "horovod":
                environment |= {
                    "HOROVOD_RANK": str(rank),
                    "HOROVOD_SIZE": str(self.size),
                    "HOROVOD_LOCAL_RANK": str(rank % per_host),
                    "HOROVOD_LOCAL_SIZE": str(per_host),
                    "HOROVOD_CROSS_RANK": str(rank // per_host),
                    "HOROVOD_CROSS_SIZE": str(len(self.layout.hosts)),
                }
                if host.name:
                    environment["HOROVOD_HOSTNAME"] = host.name
            commands.append(([*host.prefix, *worker], environment))
        return commands

    def _coordinator(self) -> dict[str, str]:
        """Starts one on the first host and returns what its members need to know."""
        host = self.layout.hosts[0]
        token = secrets.token_hex(16)
        file = Path(self._folder, "token")
        file.touch(0o600)
        file.write_text(token)
        said = Path(self._folder, "coordinator")
        command = [*host.prefix, sys.executable, "-m", "horovod.coordinator", "--token-file", str(file)]
        with open(said, "wb") as output:
            process = subprocess.Popen(
                [*command, "--listen", f"{host.address}:0"],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                **_OWN_GROUP,
            )
        self._processes.append(process)
        deadline = time.monotonic() + START_SECONDS
        while "listening on" not in (text := said.read_text()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise WorldError(f"The coordinator did not start: {text.strip()}")
            time.sleep(0.05)
        address = text.split("listening on", 1)[1].split()[0]
        return {"HOROVOD_COORDINATOR": address, "HOROVOD_TOKEN": token, "HOROVOD_JOB": "benchmark"}

    def _mpirun(self, worker: list[str], environment: dict[str, str]) -> list[str]:
        command = [*self.layout.hosts[0].prefix, "mpirun", "-np", str(self.size), *self.layout.mpi_options]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        for name in environment:
            command += ["-x", name]
        return [*command, *worker]

    def close(self) -> None:
        """Hangs up, which ends the ranks; kills what remains of them after a while. Idempotent."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        deadline = time.monotonic() + _STOP_SECONDS
        for process in reversed(self._processes):  # a coordinator is the first and goes last
            if process is self._processes[0] and self.library == "horovod":
                process.terminate()
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes = []
        if not self._log.closed:
            self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def why_missing(library: str) -> str | None:
    """None when the library can be measured, else what is missing and how to get it, in one line."""
    if library == "mpi":
        missing = [] if shutil.which("mpirun") else ["mpirun (apt-get install openmpi-bin)"]
        missing += [] if _importable("mpi4py") else ["mpi4py (pip install mpi4py)"]
        return f"Open MPI is left out: no {' and no '.join(missing)}." if missing else None
    if not _importable("torch"):
        return f"{library} is left out: no torch (pip install torch)."
    return None


def _importable(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None
