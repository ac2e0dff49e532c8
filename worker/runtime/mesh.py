"""TCP connections to the peers of a world, to all or to some of them, connected and proven, ready for the engine.

Where a connection to a peer is left from the last world (past_world.py), it is tried first: both sides throw away what
comes before the other's marker (handshake.py). When the peer has closed its end, or says nothing, the higher rank
connects anew. The lower one waits for either, and drops the old connection for a new one.

Listeners are made before the process joins, because their addresses go into the join request. When the world is known,
the higher rank of each pair connects to the lower one, `connections` times, spread over the lower one's interfaces. One
thread runs everything with non-blocking sockets and one deadline; an attempt that fails is made again, at the next
address, until then. Strangers on the port get no answer, are bounded in number and time, and delay no member.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import random
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from horovod.base.errors import EngineCode, WorldCode, coded
from horovod.base.words import capitalized, is_out_of_descriptors, reason_of
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.handshake import (
    Connecting,
    Greeting,
    Handshake,
    Listening,
    Resuming,
    StrangerError,
)
from horovod.worker.runtime.host import Interface
from horovod.worker.runtime.past_world import end
from horovod.worker.runtime.world import Endpoint, Member, World

log = logging.getLogger(__name__)

ATTEMPT_SECONDS = 3.0  # one address may take this long to connect and prove itself before the next is tried
# Seconds for a peer to speak on a connection of the last world, for which it must have the new world.
KEPT_SECONDS = 5.0
STRANGER_SECONDS = 5.0  # an incoming connection has this long for the whole handshake
MAX_STRANGERS = 128  # unproven connections at one time, above those that are expected
FIRST_RETRY_SECONDS = 0.02
LAST_RETRY_SECONDS = 0.5
SEEK_BYTES = 256 << 10  # bytes that are searched for a peer's marker in one go
# Bytes of the last world that are thrown away at most: more than the sockets of both sides hold.
MAX_DISCARDED_BYTES = 64 << 20
CHECK_SECONDS = 0.1  # how often `check` is asked while nothing happens
# Connections of a pair, where the setting does not say how many: one through each interface, because another through
# the same one makes most allreduces slower (docs/adr/0014-connections.md), and no more than this.
MOST_AUTOMATIC_CONNECTIONS = 8


class Listeners:
    """Listening sockets, one for each address of the chosen interfaces."""

    def __init__(self, interfaces: Sequence[Interface], backlog: int = 1024, ports: Sequence[int] = (0,)) -> None:
        """ports: those of HOROVOD_PORTS; 0: the system chooses."""
        self.sockets: list[socket.socket] = []
        self.endpoints: list[Endpoint] = []
        problems = []
        for interface in interfaces:
            for address in interface.addresses:
                try:
                    self._listen(address, interface.name, backlog, ports)
                except OSError as error:  # for example, IPv6 is switched off; one address that works is enough
                    if is_out_of_descriptors(error):
                        self.close()
                        sentence = f"Host {socket.gethostname()} cannot listen for its peers: {reason_of(error)}."
                        raise StartError(coded(EngineCode.TOO_MANY_OPEN_FILES, sentence)) from error
                    problems.append(f"{address} ({interface.name}): {error.strerror or error}")
        if not self.sockets:
            raise StartError(
                coded(
                    WorldCode.NO_INTERFACE,
                    f"Host {socket.gethostname()} cannot listen for its peers on any address: {'; '.join(problems)}. "
                    f"Choose {'more ports with HOROVOD_PORTS, or ' if ports[0] else ''}other interfaces with "
                    "HOROVOD_NETWORK_INTERFACES.",
                )
            )

    def _listen(self, address: str, interface: str, backlog: int, ports: Sequence[int]) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        start = random.randrange(len(ports))  # ranks of a host come at the same time, and each is to try few
        for port in (*ports[start:], *ports[:start]):
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.setblocking(False)
                if port:  # connections of a world before may be ending on it
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((address, port))
                listener.listen(backlog)
                break
            except OSError as error:
                listener.close()
                if not port or error.errno != errno.EADDRINUSE:
                    raise
        else:
            raise OSError(errno.EADDRINUSE, f"the ports {ports[0]} to {ports[-1]} (HOROVOD_PORTS) are in use")
        self.sockets.append(listener)
        self.endpoints.append(Endpoint(address, listener.getsockname()[1], interface))

    def close(self) -> None:
        for listener in self.sockets:
            listener.close()
        self.sockets.clear()


def connect_peers(
    world: World,
    listeners: Listeners,
    *,
    connections: int | None,
    deadline: float,
    partners: Collection[int] | None = None,
    check: Callable[[], None] = lambda: None,
    wire_keys: dict[int, bytes] | None = None,
    kept: Mapping[int, socket.socket] | None = None,
    unreachable_seconds: float = math.inf,
    tell_unreachable: Callable[[Mapping[int, str]], None] = lambda tried: None,
) -> dict[int, list[int]]:
    """Descriptors of `connections` proven, non-blocking sockets to each peer, in the same order on both sides.

    `partners`: the ranks that are peers, of which each has this rank among its own; None: all others. Without
    `connections` as many as both of a pair have interfaces, which both know from the world. `deadline` is on
    time.monotonic(). `check` is called now and then and ends the wait by raising. StartError names the first peer that
    could not be reached. The listeners stay the caller's; all other sockets are closed on an error. `wire_keys` gets
    the keys of each descriptor, which the two of a pair alone know. `kept`: sockets of the last world, by the rank that
    each leads to; they are owned here. `tell_unreachable` gets the peers of which no address has taken a connection for
    `unreachable_seconds`, and what was tried.
    """
    assembly = _Assembly(world, listeners, connections, partners)
    assembly.unreachable_seconds, assembly.tell_unreachable = unreachable_seconds, tell_unreachable
    try:
        assembly.resume(kept or {})
        return assembly.run(deadline, check, {} if wire_keys is None else wire_keys)
    finally:
        assembly.close()


@dataclass(eq=False)
class _Slot:
    """One connection that is to be made."""

    rank: int
    index: int
    endpoints: tuple[Endpoint, ...] = ()  # empty: the peer connects to us
    attempt: int = 0
    began: float = math.inf  # when this side first tried to connect
    is_reached: bool = False  # its host has taken a connection
    is_told: bool = False  # whether its silence was told
    next_attempt: float = 0.0
    problems: dict[Endpoint, str] = field(default_factory=dict)  # address -> the last problem with it
    link: _Link | None = None  # the attempt that is under way
    proven: socket.socket | None = None
    wire_keys: bytes = field(default=b"", repr=False)  # of `proven`
    is_resumed: bool = False  # whether `proven` is a connection of the last world

    def tried_in_words(self) -> str:
        """Its addresses, and what came of each."""
        return "; ".join(f"{one}: {self.problems.get(one, 'not tried yet')}" for one in self.endpoints)


@dataclass(eq=False)
class _Link:
    """A socket in its handshake."""

    sock: socket.socket
    handshake: Handshake
    expires: float
    slot: _Slot | None = None  # set when this side connects
    endpoint: Endpoint | None = None
    connected: bool = True
    outgoing: bytes = b""
    incoming: bytes = b""
    is_kept: bool = False
    # Marker of a kept connection, until it is found; `incoming` is then the end of what came before.
    marker: bytes = b""
    discarded_bytes: int = 0


def _automatic_connections(one: Member, other: Member) -> int:
    both = min(len({endpoint.interface for endpoint in member.endpoints}) for member in (one, other))
    return max(1, min(both, MOST_AUTOMATIC_CONNECTIONS))


def _by_turns(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """The first address of each interface, then the second of each, ...: few connections meet on one interface."""
    seen: Counter[str] = Counter()
    turns = []
    for endpoint in endpoints:
        turns.append(seen[endpoint.interface])
        seen[endpoint.interface] += 1
    return tuple(endpoint for _, endpoint in sorted(zip(turns, endpoints, strict=True), key=lambda pair: pair[0]))


class _Assembly:
    def __init__(
        self, world: World, listeners: Listeners, connections: int | None, partners: Collection[int] | None
    ) -> None:
        self._world = world
        self._listeners = listeners
        self._selector = selectors.DefaultSelector()
        self._slots = {
            (member.rank, index): _Slot(
                member.rank, index, endpoints=_by_turns(member.endpoints) if member.rank < world.rank else ()
            )
            for member in world.members
            if member.rank != world.rank and (partners is None or member.rank in partners)
            for index in range(connections or _automatic_connections(world.me, member))
        }
        self.unreachable_seconds = math.inf
        self.tell_unreachable: Callable[[Mapping[int, str]], None] = lambda tried: None
        self._inbound: dict[_Link, None] = {}  # oldest first
        self._inbound_limit = MAX_STRANGERS + len(self._slots)
        for listener in listeners.sockets:
            self._selector.register(listener, selectors.EVENT_READ, None)

    def resume(self, kept: Mapping[int, socket.socket]) -> None:
        """Tries these first. Engines keep only what is the one connection of a pair."""
        now = time.monotonic()
        for rank, sock in kept.items():
            slot = self._slots.get((rank, 0))
            if slot is None or (rank, 1) in self._slots:
                end(sock)
                continue
            handshake = Resuming(self._world.secret, self._world.epoch, self._world.rank, rank)
            # Only one of the two gives up: the lower rank goes on for as long as it would wait for a new connection.
            expires = now + KEPT_SECONDS if slot.endpoints else math.inf
            slot.link = _Link(sock, handshake, expires, slot, is_kept=True, marker=handshake.marker)
            slot.link.outgoing = handshake.take_output()
            self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, slot.link)

    def run(self, deadline: float, check: Callable[[], None], wire_keys: dict[int, bytes]) -> dict[int, list[int]]:
        for (rank, _), slot in self._slots.items():
            if rank < self._world.rank and not slot.endpoints:
                peer = capitalized(self._world.label(rank))
                sentence = (
                    f"{peer} offers no address for TCP connections; start all ranks with the same HOROVOD_TRANSPORT."
                )
                raise StartError(coded(WorldCode.MEMBERS_DISAGREE, sentence))
        while any(slot.proven is None for slot in self._slots.values()):
            check()
            now = time.monotonic()
            if now >= deadline:
                raise StartError(coded(WorldCode.UNREACHABLE_PEER, self._why_incomplete()))
            self._start_attempts(now)
            self._expire(now)
            self._tell_unreachable(now)
            for key, _ in self._selector.select(self._pause(now, deadline)):
                if key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                elif key.data.sock.fileno() >= 0:  # the socket was not closed by an earlier event
                    self._progress(key.data)
        peers: dict[int, list[int]] = {}
        for (rank, _), slot in sorted(self._slots.items(), key=lambda item: item[0]):
            assert slot.proven is not None
            descriptor = slot.proven.detach()
            slot.proven = None
            peers.setdefault(rank, []).append(descriptor)
            wire_keys[descriptor] = slot.wire_keys
        if resumed := sum(slot.is_resumed for slot in self._slots.values()):
            log.info("%d of %d connections to peers are those of the last world.", resumed, len(self._slots))
        return peers

    def close(self) -> None:
        for link in [*self._inbound, *(slot.link for slot in self._slots.values() if slot.link)]:
            link.sock.close()
        for slot in self._slots.values():
            if slot.proven is not None:
                slot.proven.close()
        self._selector.close()

    # -- time ------------------------------------------------------------------------------------------------------
    def _pause(self, now: float, deadline: float) -> float:
        times = [deadline, now + CHECK_SECONDS]
        for slot in self._slots.values():
            if slot.proven is None and slot.endpoints:
                times.append(slot.link.expires if slot.link else slot.next_attempt)
        if self._inbound:
            times.append(next(iter(self._inbound)).expires)
        return max(0.0, min(times) - now)

    def _expire(self, now: float) -> None:
        for link in [link for link in self._inbound if link.expires <= now]:
            self._drop(link, "it took too long for the handshake")
        for slot in self._slots.values():
            if slot.link and slot.link.expires <= now:
                self._drop(slot.link, "no answer" if slot.link.connected else "no connection")

    def _tell_unreachable(self, now: float) -> None:
        """A peer that is only late has its listener already, and the kernel of its host takes the connection."""
        late = [slot for slot in self._slots.values() if now - slot.began >= self.unreachable_seconds]
        silent = [slot for slot in late if not (slot.is_reached or slot.is_told or slot.proven)]
        if found := [slot for slot in silent if len(slot.problems) == len(slot.endpoints)]:
            for slot in found:
                slot.is_told = True
            self.tell_unreachable({slot.rank: slot.tried_in_words() for slot in found})

    # -- connecting ------------------------------------------------------------------------------------------------
    def _start_attempts(self, now: float) -> None:
        for slot in self._slots.values():
            if slot.endpoints and slot.proven is None and slot.link is None and slot.next_attempt <= now:
                self._connect(slot, now)

    def _connect(self, slot: _Slot, now: float) -> None:
        endpoint = slot.endpoints[(slot.index + slot.attempt) % len(slot.endpoints)]
        slot.attempt += 1
        slot.began = min(slot.began, now)
        try:
            family = socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if is_out_of_descriptors(error):
                self._give_one_up(error, "connect to")
            slot.problems[endpoint] = error.strerror or str(error)
            self._retry_later(slot, now)
            return
        sock.setblocking(False)
        handshake = Connecting(self._world.secret, self._world.epoch, self._world.rank, slot.rank, slot.index)
        link = _Link(sock, handshake, now + ATTEMPT_SECONDS, slot, endpoint, connected=False)
        slot.link = link
        try:
            code = sock.connect_ex((endpoint.address, endpoint.port))
        except (OSError, OverflowError) as error:  # not an address at all
            self._drop(link, str(error))
            return
        if code not in (0, errno.EINPROGRESS):
            self._drop(link, os.strerror(code))
            return
        self._selector.register(sock, selectors.EVENT_WRITE, link)

    def _retry_later(self, slot: _Slot, now: float) -> None:
        rounds = slot.attempt // len(slot.endpoints)
        first_of_round = slot.attempt % len(slot.endpoints) == 0
        delay = min(LAST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(rounds, 8)) if first_of_round else 0.0
        slot.next_attempt = now + delay

    # -- accepting -------------------------------------------------------------------------------------------------
    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if is_out_of_descriptors(error):
                self._give_one_up(error, "accept")
            return  # else the peer has gone already, or no connection waited
        sock.setblocking(False)
        if len(self._inbound) >= self._inbound_limit:
            self._drop(next(iter(self._inbound)), "too many connections without proof")
        link = _Link(sock, Listening(self._world.secret, self._admit), time.monotonic() + STRANGER_SECONDS)
        self._inbound[link] = None
        self._selector.register(sock, selectors.EVENT_READ, link)

    def _give_one_up(self, error: OSError, what: str) -> None:
        """Frees a descriptor that a stranger holds; StartError when none does."""
        if not self._inbound:
            me = capitalized(self._world.label(self._world.rank))
            sentence = f"{me} cannot {what} its peers: {reason_of(error)}."
            raise StartError(coded(EngineCode.TOO_MANY_OPEN_FILES, sentence)) from error
        self._drop(next(iter(self._inbound)), "too many open files")

    def _admit(self, greeting: Greeting) -> None:
        world = self._world
        if greeting.epoch != world.epoch:
            raise StrangerError(f"it is of world {greeting.epoch}, this is world {world.epoch}")
        if greeting.receiver != world.rank:
            raise StrangerError(f"it looks for rank {greeting.receiver}, this is rank {world.rank}")
        if greeting.sender <= world.rank or (greeting.sender, greeting.index) not in self._slots:
            raise StrangerError(f"no connection {greeting.index} from rank {greeting.sender} is waited for")

    # -- the handshake ---------------------------------------------------------------------------------------------
    def _progress(self, link: _Link) -> None:
        try:
            if link.marker:
                self._resume(link)
            elif not link.connected:
                code = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))
                link.connected = True
                if link.slot is not None:
                    link.slot.is_reached = True
                self._push(link)
            elif link.outgoing:
                self._push(link)
            else:
                self._pull(link)
        except BlockingIOError:
            pass
        except StrangerError as error:
            self._drop(link, str(error))
        except OSError as error:
            self._drop(link, error.strerror or str(error))

    def _resume(self, link: _Link) -> None:
        # Both at the same time: the peer takes what is sent only while it reads, as this side does.
        with contextlib.suppress(BlockingIOError):
            link.outgoing = link.outgoing[link.sock.send(link.outgoing) :] if link.outgoing else b""
        with contextlib.suppress(BlockingIOError):
            self._seek(link)
        if link.marker:
            writes = selectors.EVENT_WRITE if link.outgoing else 0
            self._selector.modify(link.sock, selectors.EVENT_READ | writes, link)
        else:
            self._push(link)

    def _seek(self, link: _Link) -> None:
        """Throws away what comes before the peer's marker, and takes nothing that comes behind it."""
        ahead = link.sock.recv(SEEK_BYTES, socket.MSG_PEEK)
        if not ahead:
            raise StrangerError("the peer has closed it")
        at = (link.incoming + ahead).find(link.marker)
        size = len(ahead) if at < 0 else at + len(link.marker) - len(link.incoming)
        seen = link.incoming + link.sock.recv(size)
        link.discarded_bytes += size
        if seen.endswith(link.marker):
            link.incoming = link.marker = b""
        elif link.discarded_bytes > MAX_DISCARDED_BYTES and link.expires < math.inf:
            raise StrangerError(f"{link.discarded_bytes} bytes came, and not the marker of this world")
        else:
            link.incoming = seen[1 - len(link.marker) :]

    def _pull(self, link: _Link) -> None:
        # Never more than the handshake needs: what comes after it belongs to the engine.
        data = link.sock.recv(link.handshake.needs - len(link.incoming))
        if not data:
            raise StrangerError("it closed the connection during the handshake")
        link.incoming += data
        if len(link.incoming) == link.handshake.needs:
            incoming, link.incoming = link.incoming, b""
            link.handshake.feed(incoming)
            self._push(link)

    def _push(self, link: _Link) -> None:
        link.outgoing += link.handshake.take_output()
        if link.outgoing:
            # A socket that takes nothing raises BlockingIOError and is written when it is ready.
            self._selector.modify(link.sock, selectors.EVENT_WRITE, link)
            link.outgoing = link.outgoing[link.sock.send(link.outgoing) :]
        if link.outgoing:
            return
        if link.handshake.needs:
            self._selector.modify(link.sock, selectors.EVENT_READ, link)
        else:
            self._finish(link)

    def _finish(self, link: _Link) -> None:
        slot = link.slot
        if slot is None:
            assert isinstance(link.handshake, Listening)
            assert link.handshake.greeting is not None
            slot = self._slots[link.handshake.greeting.sender, link.handshake.greeting.index]
            self._inbound.pop(link)
        self._selector.unregister(link.sock)
        if slot.link is not None and slot.link is not link:
            self._drop(slot.link, "the peer has reconnected")
        slot.link = None
        link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if slot.proven is not None:
            # The peer connects once more because it saw the first connection fail.
            slot.proven.close()
        slot.proven, slot.wire_keys, slot.is_resumed = link.sock, link.handshake.wire_keys, link.is_kept

    def _drop(self, link: _Link, reason: str) -> None:
        if link.slot is None:
            with contextlib.suppress(OSError):
                log.debug("A connection from %s was dropped: %s.", link.sock.getpeername(), reason)
            self._inbound.pop(link)
        elif link.is_kept:
            log.debug("The connection of the last world to rank %d is not used: %s.", link.slot.rank, reason)
            link.slot.link = None
        else:
            assert link.endpoint is not None
            link.slot.problems[link.endpoint] = reason
            link.slot.link = None
            self._retry_later(link.slot, time.monotonic())
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.sock)
        link.sock.close()

    def _why_incomplete(self) -> str:
        missing = [slot for slot in self._slots.values() if slot.proven is None]
        slot = missing[0]
        me, peer = capitalized(self._world.label(self._world.rank)), self._world.label(slot.rank)
        others = sorted({s.rank for s in missing} - {slot.rank})
        also = f" Ranks {others} are missing too." if others else ""
        todo = (
            "Check that no firewall is between the hosts, or name the interfaces that reach all of them with "
            "HOROVOD_NETWORK_INTERFACES; HOROVOD_START_TIMEOUT gives them more time."
        )
        if not slot.endpoints:
            mine = ", ".join(str(e) for e in self._listeners.endpoints)
            return f"{me} waited without success for {peer} to connect to {mine}.{also} {todo}"
        return f"{me} cannot connect to {peer}. Tried {slot.tried_in_words()}.{also} {todo}"
