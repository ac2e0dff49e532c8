"""The agents of a cluster, as the coordinator that serves them sees them, and over which interfaces their hosts reach
each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from horovod.base.errors import ClusterCode, coded
from horovod.base.words import joined, shortened
from horovod.coordinator.core.cluster import commands
from horovod.protos.v1 import agents_pb2 as pb

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
    # The agent has reported its slots, and they are not yet compared with the slots that jobs use there.
    may_have_shrunk: bool = True
    # Job -> ranks that run there, though no record asks for them: also of a share that the job has lost.
    strays: dict[str, int] = field(default_factory=dict)
    seen_at_s: float = 0.0  # when a rank on this host was last connected while the agent was away
    fitness: Fitness = field(default_factory=Fitness)

    @classmethod
    def expected(cls, name: str, now_s: float) -> Agent:
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


# Over which interfaces hosts reach each other: asked once for each pair, by connecting, and remembered.
#
# A name or a subnet proves nothing: containers of two hosts have the same bridge addresses, and firewalls forbid what
# routes allow. So each agent tries every address of every other, and counts it as reached when the agent that it is
# meant to be answers there. An interface is usable for a job when every other host of the job reaches one of its
# addresses.

PROBE_TIMEOUT_S = 5.0  # seconds for an agent to connect to another
ANSWER_TIMEOUT_S = 15.0  # seconds for the agent's answer


@dataclass(frozen=True)
class Found:
    probes: tuple[tuple[str, pb.AgentCommand], ...] = ()  # (agent, command to send to it)
    is_complete: bool = True
    interfaces: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by host
    unreachable: str = ""  # the sentence when some host can't be reached by another


@dataclass
class _Asked:
    agent: str
    targets: frozenset[str]  # the agents that the asked one is to reach
    deadline_s: float


@dataclass
class Reachability:
    _reached: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)  # (from, to) -> addresses of `to`
    _asked: dict[int, _Asked] = field(default_factory=dict)
    _overdue: dict[int, _Asked] = field(default_factory=dict)  # probes that count as unanswered until an answer comes
    _last_probe: int = 0

    def between(self, agents: Sequence[Agent], now_s: float) -> Found:
        """What is known for a job on these hosts, and what to ask for the rest."""
        if len(agents) < 2:
            return Found()
        for number, asked in list(self._asked.items()):
            # That agent is slow or gone; what it has not reached in time counts as unreachable.
            if asked.deadline_s < now_s:
                self.answered(asked.agent, number, ())
                self._overdue[number] = asked
        probes = []
        open_pairs = {(asked.agent, target) for asked in self._asked.values() for target in asked.targets}
        missing = False
        for one in agents:
            others = [other for other in agents if other is not one and (one.name, other.name) not in self._reached]
            missing = missing or bool(others)
            unasked = [other for other in others if (one.name, other.name) not in open_pairs]
            if unasked:
                probes.append((one.name, self._probe(one, unasked, now_s)))
        if missing:
            return Found(tuple(probes), is_complete=False)
        return self._chosen(agents)

    def answered(self, agent: str, probe: int, reached: Sequence[tuple[str, str]]) -> None:
        """`agent` reached these (agent, address)."""
        asked = self._asked.get(probe) or self._overdue.get(probe)
        if asked is None or asked.agent != agent:
            return
        self._asked.pop(probe, None)
        self._overdue.pop(probe, None)
        for target in asked.targets:
            self._reached[agent, target] = frozenset(address for name, address in reached if name == target)

    def forget(self, agent: str) -> None:
        """Drops what was found of this agent: it has registered again, perhaps with other addresses."""
        self._reached = {pair: found for pair, found in self._reached.items() if agent not in pair}
        self._asked = {
            number: asked
            for number, asked in self._asked.items()
            if asked.agent != agent and agent not in asked.targets
        }
        self._overdue = {  # what overdue probes say of other hosts is still of use
            number: replace(asked, targets=asked.targets - {agent})
            for number, asked in self._overdue.items()
            if asked.agent != agent and asked.targets != {agent}
        }

    def restart_limits(self, now_s: float) -> None:
        for asked in self._asked.values():
            asked.deadline_s = now_s + ANSWER_TIMEOUT_S

    def _probe(self, one: Agent, others: Sequence[Agent], now_s: float) -> pb.AgentCommand:
        self._last_probe += 1
        self._asked[self._last_probe] = _Asked(
            one.name, frozenset(other.name for other in others), now_s + ANSWER_TIMEOUT_S
        )
        targets = [
            pb.Target(agent=other.name, address=interface.address, port=other.register.probe_port)
            for other in others
            for interface in other.register.interfaces
        ]
        probe = pb.ProbeTargets(probe=self._last_probe, targets=targets, timeout_seconds=PROBE_TIMEOUT_S)
        return pb.AgentCommand(probe=probe)

    def _chosen(self, agents: Sequence[Agent]) -> Found:
        chosen: dict[str, list[str]] = {}
        failed = []
        for one in agents:
            others = [other.name for other in agents if other is not one]
            usable = [
                interface.name
                for interface in one.register.interfaces
                if all(interface.address in self._reached[other, one.name] for other in others)
            ]
            chosen[one.name] = list(dict.fromkeys(usable))
            if not usable:
                blind = [other for other in others if not self._reached[other, one.name]]
                at = ", ".join(f"{interface.address} ({interface.name})" for interface in one.register.interfaces)
                if blind:
                    failed.append(f"{shortened(blind, 4)} can't connect to {one.name} at {at or 'any address'}")
                else:
                    failed.append(f"no address of {one.name} ({at}) is reached by all of {joined(others)}")
        if failed:
            text = "; ".join(failed[:4])
            sentence = (
                f"The hosts do not reach each other: {text}. Look at routes and firewalls between them, or choose "
                "other hosts."
            )
            return Found(unreachable=coded(ClusterCode.HOSTS_UNREACHABLE, sentence))
        return Found(interfaces=chosen)
