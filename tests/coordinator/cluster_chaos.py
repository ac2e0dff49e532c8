"""Hosts and jobs that come and go by chance, on a cluster that gives slots, takes them back and replaces processes.

The hosts obey commands as agents do, each in its own time, and forget what was on the way when their streams break.
Nothing here waits: the clock is the story's. A failure says all that was done, one line each, and the same seed does
the same again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from event_words import WAITS_FOR_HOSTS
from test_cluster import QUEUED, RUNNING, Story

from horovod.coordinator.core.cluster.cluster import Cluster
from horovod.coordinator.core.cluster.effects import Command
from horovod.coordinator.core.cluster.execution import is_elastic
from horovod.coordinator.core.cluster.job import OVER, refusal_of
from horovod.coordinator.core.cluster.job_record import known
from horovod.coordinator.core.elastic.decision import Phase
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2

TERM = -15


@dataclass
class Process:
    rank: int
    incarnation: int
    pid: int
    code: int | None = None
    is_leaving: bool = False


@dataclass
class Share:
    job: str
    number: int
    replaces_failed: bool
    processes: dict[int, Process] = field(default_factory=dict)
    is_closed: bool = False  # no further process is started

    @property
    def live(self) -> list[Process]:
        return [one for one in self.processes.values() if one.code is None]

    @property
    def over(self) -> bool:
        return not self.live and (self.is_closed or not self.replaces_failed)

    def report(self) -> pb.JobReport:
        found = pb.JobReport(job=self.job, share=self.number, over=self.over)
        for one in self.processes.values():
            status = found.ranks.add(
                rank=one.rank, pid=one.pid, incarnation=one.incarnation, ended=one.code is not None
            )
            if one.code is not None:
                status.code, status.stopped = one.code, one.is_leaving or one.code == TERM
        return found


class Host:
    """Its agent, and the processes there."""

    def __init__(self, name: str, slots: int) -> None:
        self.name, self.slots, self.instance = name, slots, 0
        self.shares: dict[str, Share] = {}
        self.is_connected = False
        self.commands: deque[pb.AgentCommand] = deque()
        self.said: deque[Any] = deque()  # reports and answers to probes, on their way
        self.pids = 0

    def register(self) -> pb.Register:
        reports = [share.report() for share in self.shares.values()]
        register = pb.Register(
            protocol_version=2, version="1.0", name=self.name, instance=f"{self.name}.{self.instance}",
            slots=self.slots, jobs=reports, cpus=64, memory_bytes=1 << 40, probe_port=1,
        )  # fmt: skip
        register.interfaces.add(address=f"10.0.0.{self.name[1:]}", name="eth0")
        return register

    def disconnect(self) -> None:
        self.is_connected = False
        self.commands.clear()
        self.said.clear()

    def lose_all(self) -> None:
        """The host is started again."""
        self.disconnect()
        self.shares.clear()
        self.instance += 1

    def end(self, share: Share, process: Process, code: int) -> None:
        process.code = code
        self.tell(share)

    def tell(self, share: Share) -> None:
        if self.is_connected:
            self.said.append(share.report())

    def obey(self, command: pb.AgentCommand) -> None:
        kind = command.WhichOneof("command")
        assert kind is not None
        what = getattr(command, kind)
        if kind == "probe":
            self.said.append(pb.Reached(probe=what.probe, targets=what.targets))
            return
        share = self.shares.get(what.job)
        if kind == "start":
            self._start(what, share)
        elif share is None:
            return
        elif kind == "forget":
            if share.number == what.share:
                assert share.over
                del self.shares[what.job]
        elif kind == "leave":
            for rank, incarnation in zip(what.ranks, what.incarnations, strict=True):
                if share.processes[rank].incarnation == incarnation:
                    share.processes[rank].is_leaving = True
        else:
            share.is_closed = True
            for process in share.live if kind in ("end", "signal") else ():
                process.code = TERM
            self.tell(share)

    def _start(self, start: pb.StartShare, share: Share | None) -> None:
        if share is None or share.number < start.share:
            assert share is None or not share.live, "what is left of an earlier share runs here"
            share = self.shares[start.job] = Share(start.job, start.share, start.replaces_failed)
        if not share.is_closed and share.number == start.share:
            for one in start.ranks:
                earlier = share.processes.get(one.rank)
                if earlier is None or earlier.incarnation < one.incarnation:
                    assert earlier is None or earlier.code is not None, f"rank {one.rank} of {start.job} runs here"
                    self.pids += 1
                    share.processes.pop(one.rank, None)
                    share.processes[one.rank] = Process(one.rank, one.incarnation, 1000 * self.instance + self.pids)
        self.tell(share)


class ClusterChaos(Story):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.dice = dice = random.Random(seed)
        self.hosts = {name: Host(name, dice.randint(1, 4)) for name in ("h1", "h2", "h3", "h4")[: dice.randint(1, 4)]}
        self.count = 0  # of jobs
        self.starts = 0
        self.lines = [f"seed {seed}"]

    def play(self) -> int:
        """How many processes were started."""
        try:
            for _ in range(self.dice.randint(30, 150)):
                self._act()
                self._check()
            self._calm_down()
            self._end_all()
        except Exception as error:
            raise AssertionError("\n".join([*self.lines, f"{type(error).__name__}: {error}"])) from error
        return self.starts

    def say(self, line: str) -> None:
        self.lines.append(f"{self.now_s:8.2f}  {line}")

    def do(self, effects: list[Any]) -> None:
        super().do(effects)
        for effect in effects:
            if isinstance(effect, Command) and (host := self.hosts[effect.agent]).is_connected:
                host.commands.append(effect.command)
                self.starts += effect.command.HasField("start")

    # -- what happens --------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        dice = self.dice
        there = [host for host in self.hosts.values() if host.is_connected]
        away = [host for host in self.hosts.values() if not host.is_connected]
        ways: list[tuple[int, Callable[[], None], bool]] = [
            (30, lambda: self._deliver(dice.choice(there)), bool(there)),
            (8, self._tick, True),
            (4, self._submit, len(self._jobs()) < 4),
            (8, lambda: self._connect(dice.choice(away)), bool(away)),
            (1, lambda: self._break(dice.choice(there)), bool(there)),
            (1, lambda: self._stay_away(dice.choice(there)), bool(there)),
            (1, lambda: self._lose(dice.choice(list(self.hosts.values()))), True),
            (2, lambda: self._change(dice.choice(there)), bool(there)),
            (5, self._end_one, True),
            (3, lambda: self._repeat(dice.choice(there)), bool(there)),
            (2, lambda: self._finish(dice.choice(self._jobs(RUNNING))), bool(self._jobs(RUNNING))),
            (1, lambda: self._stop(dice.choice(self._jobs())), bool(self._jobs())),
            (1, self._take_over, True),
        ]
        able = [(weight, do) for weight, do, can in ways if can]
        dice.choices([do for _, do in able], [weight for weight, _ in able])[0]()

    def _jobs(self, *states: int) -> list[str]:
        """Those that are not over, or are in one of the states."""
        records = [job.record for job in self.cluster.jobs.values()]
        return [one.id for one in records if one.state in states or (not states and one.state not in OVER)]

    def _deliver(self, host: Host) -> None:
        if host.commands and self.dice.random() < 0.6:
            command = host.commands.popleft()
            self.say(f"{host.name} obeys {' '.join(str(command).split())}")
            host.obey(command)
        elif host.said:
            message = host.said.popleft()
            self.say(f"{host.name} says {' '.join(str(message).split())}")
            if isinstance(message, pb.Reached):
                self.do(self.cluster.reached(host.name, message.probe, message.targets, self.now_s, self.wall_s))
            else:
                self.do(self.cluster.report(host.name, message, self.now_s, self.wall_s))

    def _tick(self) -> None:
        self.tick(self.dice.choice([0.5, 1.0, 5.0, 30.0]))

    def _submit(self) -> None:
        dice = self.dice
        self.count += 1
        processes = dice.randint(1, 4)
        spec = jobs_pb2.JobSpec(command=["x"], processes=processes)
        if dice.random() < 0.7:
            policy = spec.policy
            policy.replaces_failed, policy.fewest = True, dice.randint(1, processes)
            policy.most, policy.patience_seconds = processes + dice.randint(0, 4), 60
            policy.keeps_slots = dice.random() < 0.1
            if dice.random() < 0.6:
                policy.cooldown_least_seconds, policy.cooldown_most_seconds = dice.choice([(0.5, 1), (10, 40)])
        if dice.random() < 0.2:
            spec.hosts.extend(jobs_pb2.HostSlots(name=name, slots=4) for name in self.hosts)
        assert refusal_of(spec) == ""
        self.say(f"job j{self.count} is submitted: {' '.join(str(spec).split())}")
        self.do(self.cluster.submit(f"j{self.count}", spec, self.now_s, self.wall_s))

    def _connect(self, host: Host) -> None:
        register = host.register()
        if self.cluster.refuses(register) is not None:  # the coordinator has not seen yet that the earlier one is gone
            return
        self.say(f"{host.name} registers: {' '.join(str(register).split())}")
        host.is_connected = True
        self.do(self.cluster.attach(register, self.now_s, self.wall_s))

    def _break(self, host: Host) -> None:
        self.say(f"the stream of {host.name} breaks")
        instance = f"{host.name}.{host.instance}"
        host.disconnect()
        self.do(self.cluster.detached(host.name, instance, self.now_s))

    def _stay_away(self, host: Host) -> None:
        """For so long that the host counts as lost, with all that runs on there."""
        self._break(host)
        for _ in range(3):
            self.tick(5.0)
        self._connect(host)

    def _lose(self, host: Host) -> None:
        self.say(f"{host.name} is lost")
        if host.is_connected:
            self._break(host)
        host.lose_all()

    def _change(self, host: Host) -> None:
        host.slots = self.dice.randint(0, 4)
        self.say(f"{host.name} has {host.slots} slots")
        self.do(self.cluster.slots(host.name, host.slots, self.now_s, self.wall_s))

    def _live(self) -> Iterator[tuple[Host, Share, Process]]:
        for host in self.hosts.values():
            for share in host.shares.values():
                for process in share.live:
                    yield host, share, process

    def _end_one(self) -> None:
        if live := list(self._live()):
            host, share, process = self.dice.choice(live)
            code = self.dice.choice([143, 0, -9]) if process.is_leaving else self.dice.choice([1, -9])
            self.say(f"rank {process.rank} of {share.job} on {host.name} ends with {code}")
            host.end(share, process, code)

    def _repeat(self, host: Host) -> None:
        for share in host.shares.values():
            host.tell(share)

    def _finish(self, job: str) -> None:
        self.say(f"{job} has done its work")
        for host, share, process in list(self._live()):
            if share.job == job:
                host.end(share, process, 0)

    def _stop(self, job: str) -> None:
        self.say(f"{job} is stopped")
        self.do(self.cluster.signal(job, 15, True, self.now_s, self.wall_s))

    def _take_over(self) -> None:
        self.say("another coordinator takes over")
        for host in self.hosts.values():
            host.disconnect()
        self.cluster = Cluster("1.0", 2, away_grace_s=10.0)
        self.cluster.load(self.saved.values(), self.now_s)

    # -- what must hold ------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        for job in self.cluster.jobs.values():
            record = job.record
            slots = [slot for share in record.shares for slot in share.slots]
            assert len(set(slots)) == len(slots), f"{record.id} has a slot twice: {slots}"
            agents = [share.agent for share in record.shares]
            assert len(set(agents)) == len(agents), f"{record.id} has two shares of a host: {agents}"
            for share in record.shares:
                assert set(share.leaving) <= set(share.slots)
                assert not set(share.left) & set(share.slots)
            if record.state == RUNNING and is_elastic(record.spec):
                assert len(slots) <= job.target.rules.most
                assert record.outcomes == [] or record.finishes or len(record.outcomes) <= 2 * len(slots)
        for agent in self.cluster.agents.values():
            taken = sum(
                len(share.slots) - len(share.leaving)
                for job in self.cluster.jobs.values() if not job.is_over and is_elastic(job.record.spec)
                for share in job.record.shares if share.agent == agent.name and not share.over
                and job.record.state == RUNNING and not job.record.finishes
            )  # fmt: skip
            assert not agent.is_connected or taken <= agent.register.slots, f"{agent.name} has {taken} slots in use"

    def _settle(self, seconds: float = 1.0) -> None:
        """All that is on the way arrives, all come back, and who is to leave does."""
        for _ in range(200):
            for host in self.hosts.values():
                if not host.is_connected:
                    self._connect(host)
                while host.commands or host.said:
                    self._deliver(host)
            for host, share, process in list(self._live()):
                if process.is_leaving:
                    host.end(share, process, 143)
            self._check()
            self.tick(seconds)
            if not any(host.commands or host.said for host in self.hosts.values()):
                return
        raise AssertionError("The cluster does not come to rest.")

    def _calm_down(self) -> None:
        self.say("calm")
        for _ in range(24):  # longer than every limit, and every time for which a host is aside
            self._settle(5.0)
        target = {
            (job.record.id, slot.host, slot.number, slot.incarnation)
            for job in self.cluster.jobs.values()
            if job.record.state == RUNNING
            for slot in job.target.slots
            if (slot.number, slot.incarnation) not in known(job.record)
        }
        runs = {(share.job, host.name, one.rank, one.incarnation) for host, share, one in self._live()}
        assert runs == target, f"there should run {sorted(target)}, but there run {sorted(runs)}"
        for job in self.cluster.jobs.values():
            if job.record.state == RUNNING and job.target.phase is Phase.RUNS and not self._jobs(QUEUED):
                self._check_size(job.record)

    def _check_size(self, record: jobs_pb2.JobRecord) -> None:
        """No room is left that it may use."""
        missing = self.cluster.jobs[record.id].target.rules.most - sum(len(share.slots) for share in record.shares)
        if missing > 0 and is_elastic(record.spec):
            aside = {one.agent for one in record.hosts_aside if one.until == 0}
            free = [name for name in self.hosts if self.cluster.free_slots(name) and name not in aside]
            named = {host.name for host in record.spec.hosts}
            full = {share.agent for share in record.shares if named and len(share.slots) >= 4}
            assert set(free) <= full, f"{record.id} does not grow on {free}"

    def _end_all(self) -> None:
        """In the end every job is over, or waits for more hosts than there are, and nothing is left of any."""
        for _ in range(2 * self.count + 2):
            for job in self._jobs(RUNNING):
                self._finish(job)
            self._settle()
        for job in self._jobs():
            assert self.sentence(job).startswith(WAITS_FOR_HOSTS) or self.state(job) == RUNNING, (
                f"{job} is {self.state(job)}: {self.sentence(job)}"
            )
            assert not self.cluster.jobs[job].has_slots
        left = [share for host in self.hosts.values() for share in host.shares.values()]
        assert [share for share in left if share.job not in self._jobs()] == []
