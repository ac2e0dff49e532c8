"""A job as people see it from outside: for the status page and for metrics. Values, which nothing changes any more."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from horovod.protos.v1 import negotiation_pb2

from .job import Job


@dataclass(frozen=True)
class MemberOverview:
    rank: int
    host: str
    pid: int
    away: bool  # its stream is broken, and it may come back


@dataclass(frozen=True)
class JobOverview:
    name: str
    epoch: int  # 0: no world runs
    size: int  # of its world, or of the one that is to be
    members: tuple[MemberOverview, ...]  # of its world, without those that are gone
    waiting: int  # members that wait for the next world
    waits_for: str  # a sentence, or ""
    waiting_ranks: tuple[int, ...] = ()  # of those that wait, the ranks that launchers decided
    reports: Mapping[int, negotiation_pb2.RankReport] = field(default_factory=dict)  # the latest of each rank


def overview_of(job: Job, reports: Mapping[int, negotiation_pb2.RankReport]) -> JobOverview:
    first = job.waiting.first
    return JobOverview(
        name=job.name,
        epoch=job.world.epoch if job.world else 0,
        size=len(job.world.members) if job.world else first.size if first else 0,
        members=tuple(
            MemberOverview(one.rank, one.request.host.name, one.request.pid, one.life.away_since_s is not None)
            for one in list(job.present.values())
        ),
        waiting=len(job.waiting),
        waits_for=job.progress(),
        waiting_ranks=tuple(job.waiting.by_rank),
        reports=dict(reports),
    )
