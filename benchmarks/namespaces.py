"""Several hosts on one: a network namespace for each, joined by bridges in a namespace of their own.

          switch namespace                 each host has `nics` interfaces eth0, eth1, ..., one on each bridge;
    br0 ── p0-0 ── eth0 of host 0          with a rate, both ends of each cable send at that rate at most (tc tbf)
        └─ p1-0 ── eth0 of host 1

Needs root, `ip` and `tc`. Everything is removed at the end, also after Ctrl-C; what a killed run left is removed by the
next.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from benchmarks.world import Host

DEFAULT_CONGESTION = "cubic"
_CONGESTION = "/proc/sys/net/ipv4/tcp_{}congestion_control"
_PREFIX = "hvdbench"
_NEIGHBORS = "/proc/sys/net/ipv4/neigh/default/gc_thresh{}"


class NetworkError(Exception):
    """Namespaces can't be made here; the sentence says why and what to do."""


def check_possible() -> None:
    """NetworkError unless this process can make namespaces."""
    if os.geteuid() != 0:
        raise NetworkError("Network namespaces need root: run this as root (or with sudo).")
    missing = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
    if missing:
        raise NetworkError(
            f"No {', '.join(missing)} here: install iproute2 and util-linux (apt-get install iproute2 util-linux)."
        )


class Network:
    """`with Network(2, "1gbit") as network:` gives network.hosts, ready to run commands by their prefix.

    congestion: TCP's congestion control on the hosts. Linux's own choice, so that figures do not depend on what the
    machine was set to: one that estimates rates (bbr) can take a pause of a rank, which waits for a processor, for a
    slow network and then slows everybody down for a while.
    """

    def __init__(
        self,
        hosts: int,
        rate: str | None = None,
        nics: int = 1,
        ipv6: bool = False,
        congestion: str = DEFAULT_CONGESTION,
    ) -> None:
        self._switch = f"{_PREFIX}{os.getpid()}sw"
        self._nics = nics
        self._rate = rate
        self._congestion = congestion
        self._made: list[str] = []
        self._neighbors: dict[str, str] = {}  # limits that were raised, as they were
        self.hosts = tuple(
            Host(
                name=f"{_PREFIX}{os.getpid()}h{number}",
                address=f"[fd77::{number + 1}]" if ipv6 else f"10.77.0.{number + 1}",
                interface=",".join(f"eth{nic}" for nic in range(nics)),
                prefix=_enter(f"{_PREFIX}{os.getpid()}h{number}"),
            )
            for number in range(hosts)
        )
        self._ipv6 = ipv6

    def __enter__(self) -> Network:
        check_possible()
        _remove_leftovers()
        atexit.register(self._remove)
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()
        atexit.unregister(self._remove)

    def _build(self) -> None:
        self._make_room_for_neighbors()
        self._add(self._switch)
        for nic in range(self._nics):
            _ip("-n", self._switch, "link", "add", f"br{nic}", "type", "bridge")
            _ip("-n", self._switch, "link", "set", f"br{nic}", "up")
        for number, host in enumerate(self.hosts):
            self._add(host.name)
            self._set_congestion(host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
            for nic in range(self._nics):
                self._cable(number, host.name, nic)

    def _cable(self, number: int, name: str, nic: int) -> None:
        inside, outside = f"eth{nic}", f"p{number}-{nic}"
        _ip("-n", name, "link", "add", inside, "type", "veth", "peer", "name", outside, "netns", self._switch)
        if self._ipv6:
            _ip("-n", name, "addr", "add", f"fd77:0:0:{nic:x}::{number + 1}/64", "dev", inside, "nodad")
        else:
            _ip("-n", name, "addr", "add", f"10.77.{nic}.{number + 1}/24", "dev", inside)
        _ip("-n", self._switch, "link", "set", outside, "master", f"br{nic}")
        for namespace, interface in ((name, inside), (self._switch, outside)):
            _ip("-n", namespace, "link", "set", interface, "up")
            if self._rate:
                shape = ("root", "tbf", "rate", self._rate, "burst", "128kb", "latency", "50ms")
                _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, *shape)

    def _make_room_for_neighbors(self) -> None:
        """Linux bounds the neighbors that all namespaces together know of, and each host may know all others."""
        needed = 2 * len(self.hosts) ** 2 * self._nics
        for number in (3, 2, 1):  # the largest first
            path = Path(_NEIGHBORS.format(number))
            known = path.read_text()
            if int(known) < needed * number:
                self._neighbors[str(path)] = known
                path.write_text(str(needed * number))

    def _set_congestion(self, name: str) -> None:
        try:
            with _allowed(self._congestion):
                _run("ip", "netns", "exec", name, "sh", "-c", f"echo {self._congestion} > {_CONGESTION.format('')}")
        except (NetworkError, OSError):
            known = Path(_CONGESTION.format("available_")).read_text().split()
            raise NetworkError(
                f"TCP's congestion control can't be {self._congestion} here; this kernel has {', '.join(known)}."
            ) from None

    def _add(self, name: str) -> None:
        self._made.append(name)
        _ip("netns", "add", name)

    def _remove(self) -> None:
        made, self._made = self._made, []
        for name in made:
            with contextlib.suppress(NetworkError):
                _ip("netns", "del", name)  # takes its ends of the cables along, and so the cables
        for path, known in reversed(self._neighbors.items()):
            Path(path).write_text(known)
        self._neighbors.clear()


def _enter(name: str) -> tuple[str, ...]:
    """What runs a command on a host. It has a name of its own, after which Open MPI calls its shared-memory files."""
    rename = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
    return ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", rename, name)


@contextlib.contextmanager
def _allowed(congestion: str) -> Iterator[None]:
    """Lets namespaces choose this congestion control. What the machine allows is as before afterwards: who has chosen
    keeps it. One process at a time, so that none takes back what another has allowed."""
    path = Path(_CONGESTION.format("allowed_"))
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        allowed = file.read().split()
        if congestion in allowed:
            yield
            return
        path.write_text(" ".join([*allowed, congestion]))
        try:
            yield
        finally:
            path.write_text(" ".join(allowed))


def _remove_leftovers() -> None:
    for path in Path("/run/netns").glob(f"{_PREFIX}*"):
        owner = re.match(rf"{_PREFIX}(\d+)", path.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            with contextlib.suppress(NetworkError):
                _ip("netns", "del", path.name)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NetworkError(f"`{' '.join(command)}` failed: {done.stderr.strip()}. Is this container privileged enough?")
