"""A job's state for the status page and the metrics: a copy, which does not change with the job."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from horovod.protos.v1 import negotiation_pb2, story_pb2

from .job_membership import JobMembership


@dataclass(frozen=True)
class MemberOverview:
    rank: int
    host: str
    pid: int
    away: bool  # the member's stream is broken, and it may come back


@dataclass(frozen=True)
class JobOverview:
    name: str
    epoch: int  # 0: no world runs
    size: int  # members of its world, or of the next one while none runs
    members: tuple[MemberOverview, ...]  # members of its world that are not gone
    waiting: int  # members that wait for the next world
    waits_for: str  # a sentence about what the waiting members wait for; "" if nobody waits
    # By the ranks that launchers have given waiting members: how many seconds each took to start.
    waiting_ranks: Mapping[int, float] = field(default_factory=dict)
    reports: Mapping[int, negotiation_pb2.RankReport] = field(default_factory=dict)  # rank -> its latest report
    newcomers: int = 0  # how many of `waiting` were not in the running world
    story: tuple[story_pb2.StoryEntry, ...] = ()  # the latest entries, the oldest first


def overview_of(
    job: JobMembership,
    reports: Mapping[int, negotiation_pb2.RankReport],
    story: tuple[story_pb2.StoryEntry, ...] = (),
) -> JobOverview:
    liveness, waiting = job.liveness, job.rendezvous.waiting
    first = waiting.first
    return JobOverview(
        name=job.name,
        epoch=liveness.world.epoch if liveness.runs else 0,
        size=len(liveness.world.members) if liveness.runs else first.size if first else 0,
        members=tuple(
            MemberOverview(one.rank, one.request.host.name, one.request.pid, one.life.away_since_s is not None)
            for one in list(liveness.present.values())
        ),
        waiting=len(waiting),
        waits_for=job.rendezvous.progress(),
        waiting_ranks={rank: request.started_seconds for rank, request in list(waiting.by_rank.items())},
        reports=dict(reports),
        newcomers=len(waiting) - len(waiting.claims) if liveness.runs else 0,
        story=story,
    )
