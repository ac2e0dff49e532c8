"""Which connection ends when more clients connect than a server can keep, and none has shown a token yet.

Refusing newcomers would let a few strangers who come and say nothing keep everybody else out: a seat is taken for as
long as they like. So a newcomer always gets a seat, and another guest loses its own. An honest client speaks as soon as
it is connected and needs its seat for milliseconds; strangers who hold many seats take them from each other only.

Pure, and for one event loop.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import unquote

Guest = TypeVar("Guest", bound=Hashable)

_PREFIX_BITS = 64  # bits of an IPv6 address that count: whoever has one host has a whole network of this size


@dataclass
class _Peer(Generic[Guest]):
    """The guests of one peer, in the order in which they came."""

    silent: dict[Guest, None] = field(default_factory=dict)
    spoken: dict[Guest, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.silent) + len(self.spoken)

    def next_to_go(self) -> Guest:
        """One that has said nothing goes before one that is being answered, and the oldest goes first."""
        return next(iter(self.silent or self.spoken))


class Seats(Generic[Guest]):
    """most, most_of_peer: seats of all peers together, and of one peer."""

    def __init__(self, most: int, most_of_peer: int) -> None:
        self._most = most
        self._most_of_peer = most_of_peer
        self._peer_of: dict[Guest, str] = {}
        self._peers: dict[str, _Peer[Guest]] = {}

    def __len__(self) -> int:
        return len(self._peer_of)

    def take(self, peer: str, guest: Guest) -> Guest | None:
        """`guest` has a seat from now on. Returns the guest who has lost its own for that, if none was free."""
        going: Guest | None = None
        if len(self._peers.get(peer, ())) >= self._most_of_peer:
            going = self._peers[peer].next_to_go()
        elif len(self) >= self._most:
            going = max(self._peers.values(), key=len).next_to_go()
        if going is not None:
            self.leave(going)
        self._peer_of[guest] = peer
        self._peers.setdefault(peer, _Peer()).silent[guest] = None
        return going

    def spoke(self, guest: Guest) -> None:
        """Notes that the guest has sent its request. Does nothing if the guest has lost its seat."""
        if (peer := self._peer_of.get(guest)) is not None and guest in self._peers[peer].silent:
            del self._peers[peer].silent[guest]
            self._peers[peer].spoken[guest] = None

    def leave(self, guest: Guest) -> None:
        """Idempotent."""
        if (peer := self._peer_of.pop(guest, None)) is None:
            return
        of_peer = self._peers[peer]
        of_peer.silent.pop(guest, None)
        of_peer.spoken.pop(guest, None)
        if not of_peer:
            del self._peers[peer]


def peer_of(address: str) -> str:
    """Whose seats a numeric address takes: those of its network for IPv6. Anything else takes its own."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            return str(ipaddress.ip_network((found, _PREFIX_BITS), strict=False))
        found = found.ipv4_mapped
    return str(found)


def peer_of_grpc(peer: str) -> str:
    """As `peer_of`, of gRPC's name for the other end of a connection: "ipv4:10.0.0.1:41234"."""
    kind, _, rest = unquote(peer).partition(":")
    return peer_of(rest.rpartition(":")[0].strip("[]")) if kind in ("ipv4", "ipv6") else peer
