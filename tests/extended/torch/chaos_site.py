"""Where the real chaos takes place: hosts that are namespaces, three nodes of etcd, two coordinators, and ranks."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from etcd_server import READY_S, Etcd
from fork_server import ForkServer
from replicas import Replica, server_of

from benchmarks.namespaces import Network

TRAINING_HOSTS = 2  # the third one has a node of etcd and nothing else
GRACE_S = "3"  # limits shorter than those of a user, because some tests wait for them


class Rank:
    """A process that asks before it goes on."""

    def __init__(self, name: str, host: int, server: ForkServer, host_name: str, log: Path, environment: Any) -> None:
        self.name = name
        self.host = host
        self.log = log
        self.world = 0  # the epoch of that in which it has trained last
        self.rank = -1
        self.saved = -1  # the steps that its last commit has
        self.is_killed = False
        self.is_stopped = False
        self.is_done = False
        self.exit_code: int | None = None
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("w") as said:
            self._process = server.start(environment, [theirs.fileno(), said.fileno()], host_name)

    def fileno(self) -> int:
        return self._socket.fileno()

    def question(self) -> dict[str, Any] | None:
        """None when it has ended."""
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionResetError:  # it was killed with an answer unread
            data = b""
        if data:
            asked: dict[str, Any] = json.loads(data)
            return asked
        self.exit_code = self._process.wait(60)
        self._socket.close()
        return None

    def answer(self, text: str = "go on") -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed
            self._socket.send(text.encode())

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self, number: int) -> None:
        """For one that has not ended."""
        if self.exit_code is None:
            self._process.send_signal(number)
            self._process.wait(60)
            self._socket.close()

    @property
    def lives(self) -> bool:
        return self.exit_code is None and not self.is_killed


class ChaosSite:
    """`with ExitStack() as stack: ChaosSite(folder, stack)`; NetworkError where there can be no namespaces."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self.network = stack.enter_context(Network(TRAINING_HOSTS + 1))
        self.hosts = self.network.hosts
        self.etcd = stack.enter_context(Etcd(folder, 3, hosts=self.hosts))
        log = stack.enter_context((folder / "coordinators").open("w"))
        arguments = (
            "--insecure",
            "--insecure-store",
            "--reattach-grace-seconds",
            GRACE_S,
            "--keepalive-timeout-seconds",
            GRACE_S,
        )
        self.replicas = [
            Replica(self.etcd.url, *arguments, prefix=host.prefix, address=f"{host.address}:29400", log=log)
            for host in self.hosts[:TRAINING_HOSTS]
        ]
        for replica in self.replicas:
            stack.enter_context(replica)
        self._servers = [ForkServer("chaos_rank", host.prefix) for host in self.hosts[:TRAINING_HOSTS]]
        for server in self._servers:
            stack.callback(server.close)
        self._starts: dict[str, threading.Thread] = {}
        stack.callback(self.await_starts)

    def start_rank(self, job: str, name: str, host: int, environment: dict[str, str]) -> Rank:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        environment = {
            **inherited,
            "HOROVOD_COORDINATOR": ",".join(replica.address for replica in self.replicas),
            "HOROVOD_JOB": job,
            "HOROVOD_HOSTNAME": f"host-{host}",
            "HOROVOD_KEEPALIVE_TIMEOUT_SECONDS": GRACE_S,
            "HOROVOD_REATTACH_GRACE_SECONDS": GRACE_S,
            "HOROVOD_UNREACHABLE_TIMEOUT_SECONDS": GRACE_S,
            "HOROVOD_LOG_LEVEL": "info",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        log = self._folder / f"{job}-{name}"
        return Rank(name, host, self._servers[host], f"host-{host}", log, environment)

    # -- coordinators and store --------------------------------------------------------------------------------------
    def kill_serving(self, job: str, host_cut_off: int) -> str:
        """Kills who serves the job; another process in its place is started at once. Its address, or "" for nobody."""
        self.await_starts()
        node = next(number for number in range(len(self.hosts)) if number != host_cut_off)
        address = server_of(self.etcd.endpoints[node], job, prefix=self.hosts[node].prefix)
        for replica in self.replicas:
            if replica.address == address:
                replica.kill()
                self._start("replica", replica.start)
        return address

    def kill_node(self, node: int) -> None:
        """Of etcd; it starts again at once."""
        self.await_starts("etcd")
        self.etcd.kill(node)
        ready = self.etcd.start(node)
        self._start("etcd", lambda: ready.wait(READY_S))

    def _start(self, what: str, start: Callable[[], Any]) -> None:
        self._starts[what] = threading.Thread(target=start)
        self._starts[what].start()

    def await_starts(self, *what: str) -> None:
        for one in what or tuple(self._starts):
            if (thread := self._starts.pop(one, None)) is not None:
                thread.join()

    def said(self, lines: int) -> str:
        """The end of what the coordinators have said."""
        return "\n".join((self._folder / "coordinators").read_text().splitlines()[-lines:])


def first_question(ranks: list[Rank], seconds: float) -> list[Rank]:
    """Those that ask something or have ended; [] after so long."""
    return select.select(ranks, [], [], seconds)[0]
