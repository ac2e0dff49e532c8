"""An agent that belongs to one launcher: it reads its order on stdin. When stdin closes, it ends its ranks and leaves.

The order is one line of JSON: `name` and `slots` of this host, `coordinators` (addresses, one of which this host can
reach), `token`, `keepalive_timeout_s`, `alone_s` (how long it stays without its coordinator), and with TLS `ca` (PEM)
and `server_name`. A further line, `{"slots": 2}`, says how many slots the host has from then on. The agent keeps its
state in a folder of its own, which it deletes when it leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from horovod.base.errors import LaunchCode, coded
from horovod.base.protocol import __version__
from horovod.base.setting import split_address
from horovod.base.settings import variables
from horovod.base.tokens import is_own_folder
from horovod.worker.agent.daemon import Daemon, Host
from horovod.worker.runtime.tls import ClientTls

CONNECT_TIMEOUT_S = 5.0  # for each address; all addresses are tried at the same time
ORPHAN_GRACE_S = 5.0  # how long the ranks run on after this agent was killed: no other agent takes its place
_PREFIX = "horovod-agent-"


def read_order() -> Mapping[str, Any]:
    """The first line of stdin, and no byte behind it. ValueError where it is no order."""
    line = bytearray()
    while (byte := os.read(sys.stdin.fileno(), 1)) not in (b"", b"\n"):
        line += byte
    order = json.loads(line)
    if not isinstance(order, dict):
        raise ValueError("an order is an object")
    return order


Serve = Callable[[Daemon], Awaitable[str]]


def serve_launcher(host: Host, order: Mapping[str, Any], environ: Mapping[str, str], serve: Serve) -> str:
    """Serves until the launcher is gone. Returns the sentence why the agent had to give up, or "".

    serve: runs the agent until it has given up or a signal ends it.
    """
    remove_leftovers()
    state = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.geteuid()}-")
    try:
        own = dataclasses.replace(host, state=Path(state), orphan_grace_s=ORPHAN_GRACE_S)
        return asyncio.run(_serve(own, order, environ, serve))
    finally:
        shutil.rmtree(state, ignore_errors=True)


async def _serve(host: Host, order: Mapping[str, Any], environ: Mapping[str, str], serve: Serve) -> str:
    address = await reachable(likeliest_first(order["coordinators"], environ))
    if address is None:
        sentence = f"This host does not reach the launcher at any of {', '.join(order['coordinators'])}."
        return coded(LaunchCode.UNKNOWN_HOST, sentence)
    tls: ClientTls | None = None
    if "ca" in order:
        file = host.state / "ca.pem"
        file.write_text(order["ca"])
        tls = ClientTls(str(file), server_name=order["server_name"])
        # The ranks use these files. The TLS settings in this host's environment are for other coordinators.
        environ = {name: value for name, value in environ.items() if not name.startswith("HOROVOD_TLS_")}
        environ |= variables(tls_ca=tls.ca, tls_server_name=tls.server_name)
    keepalive_timeout_s = float(order["keepalive_timeout_s"])
    daemon = Daemon(host, [address], order["token"], __version__, environ, tls, keepalive_timeout_s)
    watching = asyncio.create_task(_watch(daemon, float(order["alone_s"])))
    try:
        return await serve(daemon)
    finally:
        watching.cancel()


def likeliest_first(addresses: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """`addresses`, first the one that ssh came from, which leads to the launcher unless it was translated."""
    came_from = environ.get("SSH_CONNECTION", "").partition(" ")[0]
    return sorted(addresses, key=lambda address: split_address(address, "coordinator")[0] != came_from)


async def reachable(addresses: Sequence[str]) -> str | None:
    """The first of `addresses` that accepts connections."""

    async def accepts(address: str) -> bool:
        try:
            _, writer = await asyncio.wait_for(
                asyncio.open_connection(*split_address(address, "coordinator")), CONNECT_TIMEOUT_S
            )
        except (OSError, asyncio.TimeoutError):
            return False
        writer.close()
        return True

    asked = [asyncio.create_task(accepts(address)) for address in addresses]
    try:
        for address, answer in zip(addresses, asked, strict=True):
            if await answer:
                return address
        return None
    finally:
        for task in asked:
            task.cancel()


async def _watch(daemon: Daemon, alone_s: float) -> None:
    """Ends the agent when stdin closes, or when it has had no coordinator for `alone_s`, as when the network is cut."""
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()
    stdin = _Orders(daemon.set_slots, closed)
    loop.add_reader(sys.stdin.fileno(), stdin.read)
    waiting = asyncio.create_task(closed.wait())
    alone_since = loop.time()
    while not closed.is_set() and loop.time() - alone_since < alone_s:
        await asyncio.wait({waiting}, timeout=min(1.0, alone_s / 4))
        if daemon.registered.is_set():
            alone_since = loop.time()
    daemon.end_all()


class _Orders:
    """What the launcher says after its first line."""

    def __init__(self, set_slots: Callable[[int], None], closed: asyncio.Event) -> None:
        self._set_slots = set_slots
        self._closed = closed
        self._begun = b""  # of a line

    def read(self) -> None:
        """To be called when stdin has something to read."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(sys.stdin.fileno(), 4096)
            if not data:
                asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
                self._closed.set()
            *lines, self._begun = (self._begun + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    self._set_slots(int(json.loads(line)["slots"]))


def remove_leftovers() -> None:
    """Deletes the folders of agents that were killed, which are those whose lock no process holds."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{os.geteuid()}-*"):
        with contextlib.suppress(OSError):
            if not is_own_folder(path):
                continue  # anybody can make a folder of that name
            descriptor = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
