"""The connections to peers that outlive a world, so that the next one can use them.

Between two worlds of an elastic job this is the only owner of these sockets. The engine gives away those on which the
last word of the world is said (Mesh::hand_over in csrc/transport/mesh.h), and mesh.py takes those that lead to members
of the next world. What is left is closed; so is everything when there is no next world, and this process's copies in a
forked child.

A link belongs to two processes and not to two ranks, which change. It is a guess that the peer has kept it too, and
none that anything rests on: where it has not, its end is closed or silent, and mesh.py connects anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
from collections import Counter
from collections.abc import Mapping

from horovod.worker.runtime.world import Member, World

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
