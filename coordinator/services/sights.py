"""What this coordinator sees of its members by itself (core/world/life.py): their processes, where it can see them,
whether their hosts acknowledge what was sent to them, and whether they answer.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from horovod.base.processes import process_namespace, start_and_stack, stopped_turns
from horovod.base.setting import split_address
from horovod.base.words import shortened
from horovod.coordinator.core.world.life import EXECUTED, PROCESS_ENDED, Sight
from horovod.coordinator.core.world.membership import Membership
from horovod.protos.v1 import agents_pb2, membership_pb2

# Which connections of this coordinator are to hosts that acknowledge nothing, as the kernel knows (sock_diag(7)).
#
# A kernel acknowledges what comes for a process that is stopped, holds Python's GIL, or waits for a processor. So this
# tells a host that is out of reach from a process that is slow, which no unanswered message could. gRPC keeps its
# sockets to itself, but the kernel tells of all those of a port.

Address = tuple[str, int]

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3  # types of netlink messages
_ESTABLISHED = 1
_INFO = 2  # INET_DIAG_INFO: an attribute whose value is a struct tcp_info
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_MESSAGE_BYTES = 72  # size of a struct inet_diag_msg
_RETRANSMITS = 2  # offset of tcpi_retransmits: how often in a row something was sent again without an acknowledgement
_ANSWER_S = 1.0
_MOST_BYTES = 1 << 16

_log = logging.getLogger(__name__)


def address_of(peer: str) -> Address | None:
    """The address in gRPC's name for the other end of a connection, "ipv4:10.0.0.1:5000"; None where it is no IP."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    try:
        host, port = split_address(unquote(rest), "peer")
    except ValueError:
        return None
    return plain_host(host), port


def unacknowledged(port: int) -> set[Address]:
    """The other ends of connections to this port whose hosts acknowledge nothing for the time being. Empty where this
    kernel does not tell.
    """
    try:
        return {
            address
            for family in (socket.AF_INET, socket.AF_INET6)
            for address, retransmits in _connections(family, port)
            if retransmits > 0
        }
    except (OSError, struct.error):
        _log.debug("The kernel does not tell what is acknowledged.", exc_info=True)
        return set()


def _connections(family: int, port: int) -> Iterator[tuple[Address, int]]:
    """The other end of each, and how often in a row its kernel did not acknowledge what was sent to it."""
    ports = struct.pack("!HH", port, 0)
    request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 1 << _ESTABLISHED) + ports
    request += bytes(36) + b"\xff" * 8  # any addresses, any interface, no cookie
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_ANSWER_S)
        header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0)
        kernel.send(header + request)
        while True:
            answer = kernel.recv(_MOST_BYTES)
            place = 0
            while place + _HEADER.size <= len(answer):
                length, kind, *_ = _HEADER.unpack_from(answer, place)
                if kind in (_ERROR, _DONE):
                    return
                yield _parsed(family, answer[place + _HEADER.size : place + length])
                place += max((length + 3) & ~3, _HEADER.size)


def _parsed(family: int, message: bytes) -> tuple[Address, int]:
    (port,) = struct.unpack_from("!H", message, 6)
    host = socket.inet_ntop(family, message[24 : 28 if family == socket.AF_INET else 40])
    retransmits, place = 0, _MESSAGE_BYTES
    while place + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, place)
        if kind == _INFO and length > 4 + _RETRANSMITS:
            retransmits = message[place + 4 + _RETRANSMITS]
        place += max((length + 3) & ~3, 4)
    return (plain_host(host), port), retransmits


def plain_host(host: str) -> str:
    """A socket that takes both kinds of addresses writes those of IPv4 in another way."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


# The members' processes that this coordinator can see: it learns of their end at once, and can vouch that they live.
#
# That needs the same kernel and the same pid namespace. A pidfd is bound to the process and not to its number, so a
# process that is stopped, or swapped out for minutes, is still known to be there (pidfd_open(2)).


@dataclass
class _Watched:
    pid: int
    descriptor: int
    stack: int  # 0: this coordinator may not read the address


class ProcessWatch:
    """Used in one event loop."""

    def __init__(self, ended: Callable[[str, str], None]) -> None:
        """ended: called once with the id of a member whose process has ended, and the cause."""
        self._ended = ended
        self._namespace = process_namespace()
        self._watched: dict[str, _Watched] = {}  # member id -> its process

    def watch(self, member_id: str, pid: int, process: membership_pb2.ProcessIdentity) -> None:
        """Does nothing for a process that is not visible here, or is not the one that the member says."""
        if member_id in self._watched or not self._namespace or process.namespace != self._namespace or pid <= 0:
            return
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, OverflowError):  # it has ended, there are too many open files, or the kernel is older than 5.3
            return
        # Read after pidfd_open: if these are the right process's, the descriptor is, too.
        start_time, stack = start_and_stack(pid)
        if start_time == 0 or start_time != process.start_time:
            os.close(descriptor)
            return
        self._watched[member_id] = _Watched(pid, descriptor, stack)
        asyncio.get_running_loop().add_reader(descriptor, self._end, member_id, PROCESS_ENDED)

    def lives(self, member_id: str) -> bool:
        """True when the member's process is known to live. Tells of the end of one that runs another program by now."""
        one = self._watched.get(member_id)
        if one is None:
            return False
        if one.stack and start_and_stack(one.pid)[1] not in (0, one.stack):
            self._end(member_id, EXECUTED)
            return False
        return True

    def look(self, member_ids: Iterable[str]) -> tuple[set[str], dict[str, int]]:
        """Of these members, those whose processes are seen and not stopped, and those whose processes are: with how
        often each was given a processor so far.
        """
        runs, stopped = set(), {}
        for member_id in member_ids:
            if (one := self._watched.get(member_id)) is None:
                continue
            if (turns := stopped_turns(one.pid)) is None:
                runs.add(member_id)
            else:
                stopped[member_id] = turns
        return runs, stopped

    def forget(self, member_id: str) -> None:
        if one := self._watched.pop(member_id, None):
            asyncio.get_running_loop().remove_reader(one.descriptor)
            os.close(one.descriptor)

    def close(self) -> None:
        for member_id in list(self._watched):
            self.forget(member_id)

    def _end(self, member_id: str, cause: str) -> None:
        self.forget(member_id)
        self._ended(member_id, cause)


# Seconds for which an agent's word counts that a process is stopped; the agent repeats it each second.
AGENT_SAW_S = 2.5
HEARD_S = 2.0  # seconds for which an answer shows that the process which gave it runs
MAX_NAMED = 8  # processes in a sentence

FirstMessage = membership_pb2.JoinRequest | membership_pb2.Attach  # the message with which a stream begins


class Sights:
    """Used in one event loop. All members are given by their ids."""

    def __init__(self, ended: Callable[[str, str], None]) -> None:
        """ended: as of ProcessWatch."""
        self.port = 0  # the port to which members connect; 0: not known yet
        self._processes = ProcessWatch(ended)
        self._peers: dict[str, Address] = {}  # member id -> the other end of its latest stream
        self._answered_at_s: dict[str, float] = {}
        self._told_by_agents: dict[
            str, tuple[int, float]
        ] = {}  # of stopped ones: Sight.stopped, and when that was told

    def watch(self, first: FirstMessage, peer: str = "") -> None:
        """peer: gRPC's name for the other end of the stream."""
        self._peers.pop(first.member_id, None)
        if address := address_of(peer):
            self._peers[first.member_id] = address
        self._processes.watch(first.member_id, first.pid, first.process)

    def answered(self, member_id: str, now_s: float) -> None:
        self._answered_at_s[member_id] = now_s

    def told_by_agent(self, host: str, report: agents_pb2.JobReport, membership: Membership, now_s: float) -> None:
        """What the agent of this host says of its ranks of a job."""
        stopped = {one.pid: one.stopped_turns for one in report.ranks if one.HasField("stopped_turns")}
        if not stopped and not self._told_by_agents:
            return
        for member_id, pid in membership.pids_on(report.job, host).items():
            self._told_by_agents.pop(member_id, None)
            if pid in stopped:
                self._told_by_agents[member_id] = stopped[pid], now_s

    def forget(self, member_id: str) -> None:
        self._processes.forget(member_id)
        self._peers.pop(member_id, None)
        self._answered_at_s.pop(member_id, None)
        self._told_by_agents.pop(member_id, None)

    def of(self, job: str, membership: Membership, now_s: float) -> Sight:
        """What matters of the job's members now."""
        lives = {one for one in membership.suspected(job) if self._processes.lives(one)}
        members = membership.to_look_at(job)
        runs, stopped = self._processes.look(members)
        stopped_at_s = {}
        # What an agent said may be over by now. Where this look sees the process, too, the look decides.
        for one in (self._told_by_agents.keys() & set(members)) - runs - stopped.keys():
            turns, at_s = self._told_by_agents[one]
            if now_s - at_s < AGENT_SAW_S:
                stopped[one], stopped_at_s[one] = turns, at_s
        runs |= {one for one in members if now_s - self._answered_at_s.get(one, -HEARD_S) < HEARD_S}
        silent = self._silent(membership.doubted(job))
        return Sight(lives, runs - stopped.keys(), stopped, silent, stopped_at_s)

    def stopped_in_words(self, job: str, membership: Membership, ranks: Collection[int]) -> str:
        """Which of these ranks of the job's world have processes that are seen to be stopped, as a sentence, or ""."""
        members = membership.members_of(job, ranks)
        _, stopped = self._processes.look(members)
        if not stopped:
            return ""
        first = shortened([members[one] for one in stopped], MAX_NAMED)
        return f"Stopped, by a signal like SIGSTOP or a debugger, until a SIGCONT: {first}."

    def _silent(self, doubted: Sequence[str]) -> set[str]:
        """Those whose hosts acknowledge nothing."""
        peers = {one: self._peers[one] for one in doubted if one in self._peers}
        silent = unacknowledged(self.port) if peers and self.port else ()
        return {member_id for member_id, peer in peers.items() if peer in silent}

    def close(self) -> None:
        self._processes.close()
