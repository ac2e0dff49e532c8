"""What this coordinator sees of its members by itself (core/world/sight.py): their processes, where it can see them,
whether their hosts acknowledge what was sent to them, and whether they answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from horovod.base.words import shortened
from horovod.coordinator.core.world.membership import Membership
from horovod.coordinator.core.world.sight import Sight
from horovod.protos.v1 import agents_pb2, membership_pb2

from .acknowledgements import Address, address_of, unacknowledged
from .processes import ProcessWatch

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
