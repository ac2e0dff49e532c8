"""When a member of a running world counts as lost: when there is evidence, never because it was silent.

    evidence                                                        lost
    its process ended (pidfd here, a peer of its host or its agent  when its stream has ended too, or ENDED_S later
    says so)
    a peer's connections to it broke, and its stream is away        at once
    its stream is away for longer than the grace                    unless a witness vouches that its process lives
    its stream ended before it had its world                        at once: it has no secret to come back with

Of an elastic job also, after the job's limit (Sight):

    its process is stopped, as the coordinator or a witness sees,   after the limit, without a moment in which it ran
    while other members run
    its host acknowledges nothing to the coordinator, and a member  after half of the limit: the member has waited for
    has lost a peer, or it has not confirmed its world              the whole of it before its connections broke

A witness is the coordinator's own pidfd, or a connected member in the same process namespace that was asked. A process
of a job of fixed size that is stopped on the host of a witness is therefore never lost; only the limits of stalls end
its job.

Where an agent watches the process it knows how that ended. What others find first waits for its word, usually up to
AGENT_S (core/ending.py), so that the sentence which everybody gets names the signal.

`Life` is what is known of one member. Each method takes the time it needs and returns the cause of the loss, or "".
A cause completes "rank 1 was lost: ..." and has no full stop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from horovod.base.words import process_in_words
from horovod.protos.v1 import membership_pb2 as pb

ENDED_S = 1.0  # for so long the goodbye of a process that has ended may still be on its way

PROCESS_ENDED = "its process ended without leaving the job (it was killed or crashed; see its output)"
EXECUTED = "its process runs another program now (exec), without having left the job"
NEVER_HAD_ITS_WORLD = (
    "its connection to the coordinator ended before it had its world; the process died or was killed (see its output), "
    "or the network between them broke"
)

NEVER_HEARD_OF_ITS_WORLD = (
    "the coordinator that formed this world ended before it could tell that member of it, which joins again"
)


def peer_broke(peer: str) -> str:
    return (
        f"its connections to {peer} and to the coordinator broke; the process died or was killed (see its output), or "
        "its host or network is down"
    )


def was_stopped(limit_s: float) -> str:
    return (
        f"its process is stopped (by a signal like SIGSTOP, or a debugger) and has not run for {limit_s:g} s "
        "(HOROVOD_ELASTIC_HUNG_SECONDS)"
    )


def is_cut_off(peer: str) -> str:
    whom = f"{peer} and the coordinator" if peer else "the coordinator"
    return (
        f"its host acknowledges nothing that {whom} sent to it (HOROVOD_ELASTIC_HUNG_SECONDS); the host, its link or "
        "the network between them is down"
    )


def stayed_away(away_s: float) -> str:
    return (
        f"its connection to the coordinator broke and has not come back for {away_s:.0f} s "
        "(HOROVOD_REATTACH_GRACE_SECONDS): the process, its host or the network between them is down, or the process "
        "was stopped or in a C call that held Python's GIL while its connection broke"
    )


@dataclass
class Life:
    has_world: bool = False  # the member said that it has its world, so it knows the world's secret
    away_since_s: float | None = None  # since when it has no stream; None: it is connected
    vouched_at_s: float = 0.0  # when a witness last vouched for it since it went away
    accused: str = ""  # the cause that follows from what a peer said of its connections
    accuser: str = ""  # that peer
    ended_at_s: float | None = None
    ended: str = ""  # why it is known that its process has ended
    agent_told: bool = False  # the agent has told how the process ended
    held: str = ""  # the cause of its loss, while the loss waits for the agent's word
    held_at_s: float = 0.0
    held_for_s: float = 0.0
    unseen: bool = False  # it was a member at another coordinator, and has not connected to this one
    stopped_until_s: float = 0.0  # until when it counts as stopped: the latest look that found it so
    stopped_since_s: float | None = None  # since when it was seen to be stopped; None: it was not
    turns: int = 0  # how often the stopped process was given a processor
    silent_since_s: float | None = None  # since when its host acknowledges nothing; None: it does

    def needs_watching(self) -> bool:
        return self.away_since_s is not None or self.ended_at_s is not None or bool(self.held)

    def disconnected(self, now_s: float) -> str:
        if not self.has_world:
            return self.ended or NEVER_HAD_ITS_WORLD
        if self.away_since_s is None:
            self.away_since_s = self.vouched_at_s = now_s
        return self.ended or self.accused

    def restored(self, now_s: float) -> None:
        """It is a member of a world that another coordinator formed, and may or may not have been told."""
        self.has_world = self.unseen = True
        self.away_since_s = self.vouched_at_s = now_s

    def attached(self) -> None:
        self.away_since_s = None
        self.has_world = True
        self.unseen = False

    def process_ended(self, cause: str, now_s: float) -> str:
        if self.ended_at_s is None:
            self.ended_at_s, self.ended = now_s, cause
        return self.ended if self.away_since_s is not None else ""

    def agent_saw_its_end(self, cause: str, now_s: float) -> str:
        """Its agent knows best how it ended."""
        self.agent_told, self.ended = True, cause
        self.ended_at_s = now_s if self.ended_at_s is None else self.ended_at_s
        return cause if self.away_since_s is not None or self.held else ""

    def hold(self, cause: str, now_s: float, agent_s: float) -> bool:
        """Lets the cause wait for so long for the agent's word. True if no cause waited before."""
        is_first = not self.held
        if is_first:
            self.held, self.held_at_s, self.held_for_s = cause, now_s, agent_s
        return is_first

    def peer_broke(self, peer: str) -> str:
        self.accused, self.accuser = self.accused or peer_broke(peer), self.accuser or peer
        return self.accused if self.away_since_s is not None else ""

    def vouched(self, now_s: float) -> None:
        """A witness says that the process lives."""
        self.vouched_at_s = now_s

    @property
    def has_ended(self) -> bool:
        """Whether somebody has seen the process end."""
        return self.ended_at_s is not None

    @property
    def evidence(self) -> str:
        """The kind of the evidence: the label of a metric (docs/metrics.md)."""
        if self.ended:
            return "process_ended"
        if self.stopped_since_s is not None:
            return "stopped"
        if self.silent_since_s is not None:
            return "cut_off"
        is_cut_off = self.accused or self.away_since_s is not None or not self.has_world
        return "connection_lost" if is_cut_off else "other"

    def restart_limits(self, now_s: float) -> None:
        if self.away_since_s is not None:
            self.vouched_at_s = now_s
        if self.ended_at_s is not None:
            self.ended_at_s = now_s
        self.held_at_s = now_s
        self.stopped_since_s = self.silent_since_s = None

    def seen(self, stopped_turns: int | None, is_silent: bool, now_s: float, stopped_at_s: float | None = None) -> None:
        """What the coordinator has seen. stopped_turns: how often its process, which is stopped, was given a processor;
        None: it is not stopped, or can't be seen. stopped_at_s: when it was seen to be stopped; None: now.
        """
        at_s = now_s if stopped_at_s is None else stopped_at_s
        if stopped_turns is None:
            self.stopped_since_s = None
        elif self.stopped_since_s is None or self.turns != stopped_turns:
            self.stopped_since_s, self.turns = at_s, stopped_turns
        self.stopped_until_s = at_s
        if not is_silent:
            self.silent_since_s = None
        elif self.silent_since_s is None:
            self.silent_since_s = now_s

    def doubted(self, is_world_torn: bool) -> bool:
        """Whether it matters that its host acknowledges nothing. is_world_torn: a member has lost a peer."""
        return self.away_since_s is None and (is_world_torn or not self.has_world)

    def hung(self, now_s: float, limit_s: float, is_world_torn: bool) -> str:
        if self.stopped_since_s is not None and self.stopped_until_s - self.stopped_since_s >= limit_s:
            return was_stopped(limit_s)
        is_silent = self.silent_since_s is not None and now_s - self.silent_since_s >= limit_s / 2
        return is_cut_off(self.accuser) if is_silent and self.doubted(is_world_torn) else ""

    def overdue(self, now_s: float, grace_s: float) -> str:
        if self.held and now_s - self.held_at_s >= self.held_for_s:
            return self.held
        if self.ended_at_s is not None and now_s - self.ended_at_s > ENDED_S:
            return self.ended
        if self.away_since_s is not None and now_s - self.vouched_at_s > grace_s:
            return stayed_away(now_s - self.away_since_s)
        return ""


@dataclass
class Present:
    """A member of the running world that has neither left nor been lost."""

    rank: int
    request: pb.JoinRequest
    life: Life = field(default_factory=Life)

    @property
    def member_id(self) -> str:
        return self.request.member_id

    @property
    def started_as(self) -> int:
        """The rank that its launcher gave it."""
        return self.request.requested_rank if self.request.HasField("requested_rank") else self.rank

    def __str__(self) -> str:
        return process_in_words(self.rank, self.request.pid, self.request.host.name)


# What a coordinator sees of the members of a job by itself, beside what they say: it looks at each tick.

DEFAULT_HUNG_S = 3.0


@dataclass(frozen=True)
class Sight:
    """All by member id.

    lives: members that may be lost, whose processes are seen to live. runs: members whose processes are seen and are
    not stopped, and those that have just said something. stopped: members whose processes are stopped, with how often
    each was given a processor so far: one that was continued meanwhile has another number. stopped_at_s: when that was
    seen, of those for which it was not now. silent: members whose hosts acknowledge nothing of what was sent to them.
    """

    lives: Set[str] = frozenset()
    runs: Set[str] = frozenset()
    stopped: Mapping[str, int] = field(default_factory=dict)
    silent: Set[str] = frozenset()
    stopped_at_s: Mapping[str, float] = field(default_factory=dict)


def hung_limit_s(world: pb.World) -> float:
    """After how many seconds members of this world that are stopped or cut off are given up; 0: never. Jobs of fixed
    size can't go on without them, so they wait.
    """
    if not world.HasField("sizes"):
        return 0.0
    try:
        value = float(world.options.get("hung_seconds", DEFAULT_HUNG_S))
    except ValueError:
        return DEFAULT_HUNG_S
    return value if math.isfinite(value) and value >= 0 else DEFAULT_HUNG_S
