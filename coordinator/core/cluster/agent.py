"""An agent of a cluster, as the coordinator that serves agents sees it."""

from dataclasses import dataclass, field

from horovod.protos.v1 import agents_pb2 as pb

from . import commands
from .effects import Command
from .hosts import Fitness
from .placement import Capacity

_SIGTERM = 15


@dataclass
class Agent:
    name: str
    register: pb.Register
    away_since_s: float | None = None  # since when the agent has no stream; None: it is connected
    is_draining: bool = False
    # The agent has told its slots, and they were not yet compared with those that jobs have there.
    may_have_shrunk: bool = True
    # Job -> ranks that run there, though no record asks for them: also of a share that the job has lost.
    strays: dict[str, int] = field(default_factory=dict)
    seen_at_s: float = 0.0  # when a rank on this host was last connected while the agent was away
    fitness: Fitness = field(default_factory=Fitness)

    @classmethod
    def expected(cls, name: str, now_s: float) -> "Agent":
        """An agent that has not registered with this coordinator yet."""
        return cls(name, pb.Register(name=name), away_since_s=now_s)

    @property
    def is_connected(self) -> bool:
        return self.away_since_s is None

    def unseen_s(self, now_s: float) -> float:
        """For how long neither the agent, which is away, nor one of its ranks was connected."""
        assert self.away_since_s is not None
        return now_s - max(self.away_since_s, self.seen_at_s)

    def capacity(self) -> Capacity:
        """What its host has for jobs when no job runs there."""
        own = self.register
        return Capacity(self.name, own.slots, tuple(own.gpus), own.cpus, own.memory_bytes, dict(own.labels))

    def unwanted(self, report: pb.JobReport) -> list[Command]:
        """Ends what it runs although no record asks for it. Its slots are taken until then."""
        if report.over:
            self.strays.pop(report.job, None)
            return [Command(self.name, commands.forget(report.job, report.share))]
        is_new = report.job not in self.strays
        # No rank of it has ended before the first report.
        self.strays[report.job] = sum(not rank.ended for rank in report.ranks)
        return [Command(self.name, commands.signal(report.job, _SIGTERM, stop=True))] if is_new else []
