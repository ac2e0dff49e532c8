"""What a process keeps of its last world, so that it can join the next one as the member that it was."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from horovod.base.proofs import rejoin_proof
from horovod.protos.v1 import membership_pb2
from horovod.worker.runtime.world import Member, World

if TYPE_CHECKING:
    from horovod.worker.runtime.session import Session


# The connections to peers that outlive a world, so that the next one can use them.
#
# Between two worlds of an elastic job this is the only owner of these sockets. The engine gives away those on which
# the last word of the world is said (Mesh::hand_over in csrc/transport/mesh.h), and mesh.py takes those that lead to
# members of the next world. What is left is closed; so is everything when there is no next world, and this process's
# copies in a forked child.
#
# A link belongs to two processes and not to two ranks, which change. It is a guess that the peer has kept it too, and
# none that anything rests on: where it has not, its end is closed or silent, and mesh.py connects anew.

# Bytes of the last world that may still lie in front of the first word of the next one. To bring more to a peer that
# throws it away would take longer than another connection.
MAX_WAITING_BYTES = 256 << 10

_Process = tuple[str, str, int]


class KeptLinks:
    """Used by one thread at a time."""

    def __init__(self) -> None:
        self._sockets: dict[_Process, socket.socket] = {}

    def __len__(self) -> int:
        return len(self._sockets)

    def keep(self, world: World, descriptors: Mapping[int, int]) -> None:
        """Owns these from now on, by the rank in `world` that each leads to."""
        self.close()
        processes = _by_rank(world)
        for rank, descriptor in descriptors.items():
            link = socket.socket(fileno=descriptor)
            link.setblocking(False)
            if rank in processes:
                self._sockets[processes[rank]] = link
            else:
                end(link)

    def take(self, world: World) -> dict[int, socket.socket]:
        """Those to members of this world, by rank, which are the caller's now. All others are closed."""
        taken = {}
        for rank, process in _by_rank(world).items():
            link = self._sockets.get(process)
            if link is not None and _waiting_bytes(link) <= MAX_WAITING_BYTES:
                taken[rank] = self._sockets.pop(process)
        self.close()
        return taken

    def close(self) -> None:
        while self._sockets:
            end(self._sockets.popitem()[1])

    def close_copies(self) -> None:
        """In a forked child: the connections stay the parent's."""
        while self._sockets:
            self._sockets.popitem()[1].close()


def end(link: socket.socket) -> None:
    """The peer is to know at once, also where somebody else still has the descriptor."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    link.close()


def _by_rank(world: World) -> dict[int, _Process]:
    """Of all members that are a process alone; threads that play ranks have one process for several."""
    processes = {member.rank: _process(member) for member in world.members}
    counts = Counter(processes.values())
    return {rank: process for rank, process in processes.items() if counts[process] == 1 and rank != world.rank}


def _process(member: Member) -> _Process:
    return member.host, member.shared_memory_domain, member.pid


def _waiting_bytes(link: socket.socket) -> int:
    """What was sent and is not acknowledged yet, or waits to be sent."""
    try:
        count = fcntl.ioctl(link.fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
    except OSError:
        return MAX_WAITING_BYTES + 1
    return int(struct.unpack("i", count)[0])


@dataclass(frozen=True)
class PastWorld:
    coordinator: str
    job: str
    epoch: int
    rank: int
    secret: bytes

    def __repr__(self) -> str:
        return f"PastWorld({self.coordinator!r}, {self.job!r}, epoch={self.epoch}, rank={self.rank})"

    def rejoin(self, member_id: str) -> membership_pb2.Rejoin:
        proof = rejoin_proof(self.secret, self.job, self.epoch, self.rank, member_id)
        return membership_pb2.Rejoin(epoch=self.epoch, rank=self.rank, proof=proof)


@dataclass
class LastWorld:
    """Of one process, or of one thread that stands for one. Written when a world stands, read before the next; the
    links and the session when a world ends."""

    world: PastWorld | None = None
    links: KeptLinks = field(default_factory=KeptLinks)  # empty except between two worlds
    # Between two worlds: its stream is open, so that the coordinator sees when this process ends.
    session: Session | None = None
    returns: bool = False  # whether this process has left the world to join the next one at once
    # Of elastic training: how many commits the state of this process holds, and the epoch in which that was last made
    # equal on all ranks.
    commits: int = 0
    state_epoch: int = 0

    def leave(self, session: Session, reason: str, *, returns: bool, failed: bool = False) -> None:
        """Says goodbye; one that returns keeps the stream for `let_go`."""
        if session.close(reason, returns=returns, failed=failed, stays=returns):
            self.let_go()
            self.session = session

    def let_go(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.let_go()

    def remember(self, coordinator: str, world: World) -> None:
        self.world = PastWorld(coordinator, world.job, world.epoch, world.rank, world.secret)

    def is_of(self, coordinator: str | None, job: str) -> bool:
        """Whether this process was in a world of this coordinator and job."""
        return self.world is not None and (self.world.coordinator, self.world.job) == (coordinator, job)

    def rejoin(self, coordinator: str, job: str, member_id: str) -> membership_pb2.Rejoin | None:
        """The proof for another join; None when the last world was none of this coordinator and job."""
        return self.world.rejoin(member_id) if self.world and self.is_of(coordinator, job) else None
