"""Elastic jobs on agents, as stories for tests. No clock, no socket."""

from __future__ import annotations

from typing import Any

from test_cluster import Story, report

from horovod.protos.v1 import jobs_pb2


class Elastic(Story):
    def submit_elastic(self, processes: int, fewest: int = 1, most: int = 4, **fields: Any) -> None:
        policy = jobs_pb2.Policy(replaces_failed=True, fewest=fewest, most=most, patience_seconds=60)
        policy.MergeFrom(fields.pop("policy", jobs_pb2.Policy()))
        self.submit("j", processes, policy=policy, **fields)
        self.reach()

    def slots(self) -> dict[str, list[int]]:
        return {share.agent: list(share.slots) for share in self.cluster.jobs["j"].record.shares}

    def leaves(self) -> list[tuple[str, list[tuple[int, int]]]]:
        """The processes that the scheduler has asked to leave: for each agent, their ranks and incarnations."""
        found = [(agent, what) for agent, kind, what in self.sent if kind == "leave"]
        self.sent.clear()
        return [(agent, list(zip(what.ranks, what.incarnations, strict=True))) for agent, what in found]

    def aside_s(self, agent: str) -> float:
        """For how long the host gets no process of the job from now on."""
        (found,) = [one for one in self.cluster.jobs["j"].record.hosts_aside if one.agent == agent]
        return found.until - self.wall_s

    def runs(self, agent: str, codes: dict[int, int | None] | None = None, over: bool = False) -> None:
        """The agent reports its processes of the job, all of which run unless `codes` says how they ended."""
        share = self.cluster.jobs["j"].share_of(agent)
        assert share is not None
        found = report("j", codes if codes is not None else dict.fromkeys(share.slots), over)
        found.share = share.generation
        for rank in found.ranks:
            rank.incarnation = dict(zip(share.slots, share.incarnations, strict=False)).get(rank.rank, 1)
        self.do(self.cluster.report(agent, found, self.now_s, self.wall_s))

    def used(self) -> dict[str, list[int]]:
        """The slots of each host that has some."""
        return {host: slots for host, slots in self.slots().items() if slots}

    def starts(self) -> list[tuple[str, int, list[tuple[int, int]]]]:
        """Of each start that was sent: where, the size, and rank and incarnation of each process."""
        found = [(agent, start) for agent, kind, start in self.sent if kind == "start"]
        self.sent.clear()
        return [(agent, start.size, [(one.rank, one.incarnation) for one in start.ranks]) for agent, start in found]


def two_of_two(**fields: Any) -> Elastic:
    story = Elastic()
    story.agent("h1")
    story.agent("h2")
    story.submit_elastic(4, **fields)
    story.runs("h1")
    story.runs("h2")
    story.sent.clear()
    return story


def without_hosts(fewest: int = 1) -> Elastic:
    """A job of two processes, whose one host was lost."""
    story = Elastic()
    story.agent("h1")
    story.submit_elastic(2, fewest=fewest)
    story.runs("h1")
    story.away("h1")
    story.tick(11)
    return story
