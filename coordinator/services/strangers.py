"""Connections on which nobody has shown yet that they may be here: how many there may be, and for how long.

gRPC asks for no token before a call comes, so whoever can connect holds descriptors and memory of a coordinator with
connections on which nothing is said, or on which every call is refused. gRPC limits neither how many of them one
address has nor how long they last, and Python never sees them. But the kernel names both ends of each descriptor of
this process, and one that is shut down ends gRPC's connection in order, as if the peer had closed it.

A connection is a stranger's until a call on it is admitted (auth.py). An honest client calls as soon as it is
connected. One that has waited for too long is connected again by gRPC, and its user does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass

from horovod.base.seats import peer_of

from .sights import Address, address_of, plain_host

LOOK_S = 0.25
FULL_LOOKS = 120  # one look of so many counts all connections, whether there seem to be strangers or not
MAX_LOOKS = 40  # looks for which a stranger may stay
MAX_OF_PEER = 4096  # strangers of one address. All members of a large world may come from one in the same moment
MAX_STRANGERS = 8192
MAX_REFUSED = 4  # refused calls of one connection; a member with a wrong token gives up after the first
# Seconds until a look, after a connection had more refused calls: its other calls wait to be served, and take memory.
SOON_S = 0.05
LOOK_SHARE = 10  # the pause between two looks is this many times the duration of a look
MAX_REMEMBERED = 1024  # connections with refused calls, before a look tells which of them are still there
FEW = 32  # with no more strangers than this, none is looked at
BUSY_CALLS = 64  # admitted between two looks: calls wait to be served, so that those who made them are not late
_SLICE = 128  # descriptors that are looked at before others in this event loop have their turn

_log = logging.getLogger(__name__)


@dataclass
class _Stranger:
    looks: int = 0
    refused: int = 0


class Strangers:
    """Used in one event loop."""

    def __init__(self) -> None:
        # Ports on which this coordinator listens; while there are none, nobody is looked at.
        self.ports: set[int] = set()
        self._known: set[Address] = set()
        self._strangers: dict[Address, _Stranger] = {}  # connections of strangers, the oldest first
        self._watching: Counter[Address] = Counter()  # open watches of the health service, which asks for no token
        self._others = 0  # descriptors of this process that are no connections of clients
        self._admitted = 0  # calls since the last look
        self._number = 0  # number of the latest look
        self._suspect = asyncio.Event()  # set when a connection is stubborn

    # -- what calls show -----------------------------------------------------------------------------------------------

    def admitted(self, peer: str) -> None:
        """A call of this peer (as gRPC names it) may be here, and so may its connection."""
        self._admitted += 1
        if address := address_of(peer):
            self._known.add(address)
            self._strangers.pop(address, None)

    def refused(self, peer: str) -> None:
        if (address := address_of(peer)) and address not in self._known:
            one = self._strangers.setdefault(address, _Stranger())
            one.refused += 1
            if _is_stubborn(one):
                self._suspect.set()

    @contextlib.contextmanager
    def watching(self, peer: str) -> Iterator[None]:
        """For as long as it has one of the few watches that strangers may have, its connection may stay."""
        address = address_of(peer) or ("", 0)
        self._watching[address] += 1
        try:
            yield
        finally:
            self._watching[address] -= 1
            if not self._watching[address]:
                del self._watching[address]

    # -- looking -------------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """For ever."""
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._suspect.wait(), LOOK_S)
            began_s = time.monotonic()
            try:
                await self.look()
            except OSError:
                _log.debug("The kernel does not report this process's connections.", exc_info=True)
            await asyncio.sleep(max(SOON_S, LOOK_SHARE * (time.monotonic() - began_s)))

    async def look(self) -> int:
        """Ends the connections of strangers that have stayed too long or are too many; how many those are."""
        admitted, self._admitted = self._admitted, 0
        self._number += 1
        seem = _descriptors() - self._others - len(self._known)
        is_suspect = len(self._strangers) > MAX_REMEMBERED or self._suspect.is_set()
        self._suspect.clear()
        if not self.ports or (seem <= FEW and not is_suspect and self._number % FULL_LOOKS):
            return 0
        found = {address: number async for number, address in self._connections()}
        self._others = _descriptors() - len(found)
        self._known &= found.keys()
        here = {address: one for address, one in self._strangers.items() if address in found}
        for address in found.keys() - self._known - here.keys():
            here[address] = _Stranger()
        self._strangers = here
        if admitted < BUSY_CALLS:
            for one in here.values():
                one.looks += 1
        going = set(_overdue(here, self._watching)) | set(_too_many(here))
        for address in going:
            _shut(found[address], address, self.ports)
            del here[address]
        if going:
            _log.info("%d connections ended on which nobody had shown a token.", len(going))
        return len(going)

    async def _connections(self) -> AsyncIterator[tuple[int, Address]]:
        """Descriptor and other end of each client's connection."""
        for place, name in enumerate(os.listdir("/proc/self/fd")):
            if place % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            if address := _other_end(int(name), self.ports):
                yield int(name), address


def _is_stubborn(one: _Stranger) -> bool:
    return one.refused > MAX_REFUSED


def _overdue(strangers: dict[Address, _Stranger], watching: Counter[Address]) -> Iterator[Address]:
    for address, one in strangers.items():
        if _is_stubborn(one) or (one.looks > MAX_LOOKS and address not in watching):
            yield address


def _too_many(strangers: Iterable[Address]) -> Iterator[Address]:
    """The latest of those peers that have the most: the earlier ones are closer to being served."""
    of: dict[str, list[Address]] = {}
    for address in strangers:
        of.setdefault(peer_of(address[0]), []).append(address)
    count = sum(map(len, of.values()))
    for addresses in sorted(of.values(), key=len, reverse=True):
        most = min(MAX_OF_PEER, max(len(addresses) - max(0, count - MAX_STRANGERS), MAX_STRANGERS // len(of), 1))
        yield from addresses[most:]
        count -= max(0, len(addresses) - most)


def _descriptors() -> int:
    """How many this process has open. Linux tells by the size of the folder since 6.2."""
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))


def _other_end(number: int, ports: set[int]) -> Address | None:
    """Of a connection to one of the ports; None if the descriptor is anything else, or was closed meanwhile."""
    try:
        looking = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=number)
    except OSError:
        return None
    try:
        if looking.getsockname()[1] not in ports:
            return None
        host, port = looking.getpeername()[:2]
        return plain_host(host), port
    except (OSError, IndexError, TypeError, ValueError):
        return None
    finally:
        looking.detach()


def _shut(number: int, address: Address, ports: set[int]) -> None:
    """Ends the connection. The descriptor may be another one's by now, so a duplicate of it is asked first."""
    with contextlib.suppress(OSError):
        duplicate = os.dup(number)
        try:
            if _other_end(duplicate, ports) == address:
                with contextlib.closing(socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=duplicate)) as one:
                    duplicate = -1
                    one.shutdown(socket.SHUT_RDWR)
        finally:
            if duplicate >= 0:
                os.close(duplicate)
