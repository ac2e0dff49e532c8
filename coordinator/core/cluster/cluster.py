"""The agents of a cluster and the jobs that people submit to it: which run where, which wait and why, how they end.

        queued ──place──► connecting ──► running ──► succeeded
          │                    │            │
          │                    └────────────┼──► ending ──► failed | stopped
          └──────────────stop───────────────┘

A job is queued until there is room for all of its ranks. The queue is first in, first out: a job waits for those
before it, except for one that not even an empty cluster could hold. A job that spans hosts is *connecting* while they
find out over which interfaces they reach each other. Its first failed rank makes it *ending*: ranks on other hosts are
given the grace that those beside it get from their own agent. When a host whose agent
stays away is lost, and its ranks with it, is in hosts.py; so is which hosts are set aside. A job goes back to the queue
when the one host that it was given could not start any of it.

All of it stands in the record of a job, which is saved before anything is done that follows from it. So another
coordinator goes on from the records and from what the agents say when they register: commands are idempotent, and what
an agent runs that no record knows is ended.

Pure: time is an argument, effects are what the caller is to do, in their order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from horovod.base.words import plural, printable, ranks_in_words, shortened
from horovod.coordinator.core.attendance import Attendance
from horovod.coordinator.core.elastic.decision import Observed, decide
from horovod.coordinator.core.elastic.target import Phase
from horovod.coordinator.core.ending import RankEnded
from horovod.coordinator.core.ranks import Seat, assign
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2

from . import lines, record_size
from .agent import Agent
from .hosts import grace_of
from .job import OVER, ClusterJob, rank_ends, resources_of
from .outcomes import incarnations, known
from .placement import Capacity, Part, Resources, place
from .reachability import Reachability
from .target_record import exits_of

KEPT_JOBS = 200  # jobs that are over, of which the records are kept
MOST_STARTS = 5  # attempts to start one job. A job that no host can start would otherwise set all of them aside.
_SIGTERM = 15


@dataclass(frozen=True)
class Save:
    """Write the record to the store before the effects that follow."""

    job: str
    record: bytes
    is_new: bool = False  # the job's first record; the caller calls `withdraw` if the store refuses it


@dataclass(frozen=True)
class Erase:
    job: str


@dataclass(frozen=True)
class Command:
    """Send it to the agent; nothing happens when it is away."""

    agent: str
    command: pb.AgentCommand


@dataclass(frozen=True)
class Changed:
    """Tell those who follow the job that it has changed."""

    job: str


@dataclass(frozen=True)
class Notice:
    """Write this sentence to the log."""

    sentence: str


Effect = Save | Erase | Command | Changed | Notice | RankEnded


def job_of(effect: Effect) -> str:
    """The job that the effect belongs to, or "". Effects of one job are carried out in their order."""
    if isinstance(effect, Notice):
        return ""
    if not isinstance(effect, Command):
        return effect.job
    kind = effect.command.WhichOneof("command")
    return str(getattr(getattr(effect.command, kind), "job", "")) if kind else ""


def begins(effect: Effect) -> bool:
    """Whether the effect makes an agent begin something, so that the record must be saved before."""
    return isinstance(effect, Command) and effect.command.WhichOneof("command") in ("start", "run_line")


def may_precede_record(effect: Effect) -> bool:
    """Whether the effect may be carried out while the store takes no writes, unless one that `begins` is before it.

    If so, the next coordinator would decide the same from what agents tell it. `forget` deletes what they tell.
    """
    if isinstance(effect, Command):
        return effect.command.WhichOneof("command") in ("end", "signal")
    return isinstance(effect, Changed | RankEnded)


@dataclass
class Cluster:
    version: str  # of the package; agents must have the same
    protocol_version: int
    away_grace_s: float  # a host whose agent is away for longer is lost, unless its ranks may live (hosts.py)
    agents: dict[str, Agent] = field(default_factory=dict)
    jobs: dict[str, ClusterJob] = field(default_factory=dict)
    reachability: Reachability = field(default_factory=Reachability)

    # -- records -----------------------------------------------------------------------------------------------------

    def load(self, records: Iterable[jobs_pb2.JobRecord], now_s: float) -> None:
        """Begins with the records of an earlier coordinator. Agents that run their jobs count as away from now on."""
        for record in records:
            job = self.jobs[record.id] = ClusterJob(record)
            for share in record.shares:
                # Also for a job that is over, because what its ranks printed is on that host.
                is_wanted = share.started or not (share.over or job.is_over)
                if is_wanted and share.agent not in self.agents:
                    self.agents[share.agent] = Agent.expected(share.agent, now_s)

    def submit(self, job_id: str, spec: jobs_pb2.JobSpec, now_s: float, wall_s: float) -> list[Effect]:
        """Takes a job that `refusal_of` does not refuse."""
        number = 1 + max((job.record.number for job in self.jobs.values()), default=0)
        record = jobs_pb2.JobRecord(id=job_id, number=number, spec=spec, submitted_at=wall_s)
        self.jobs[job_id] = ClusterJob(record)
        first = Save(job_id, record_size.stored(record), is_new=True)
        return [first, Changed(job_id), *self.schedule(now_s, wall_s), *self._forget_old()]

    def withdraw(self, job_id: str, now_s: float, wall_s: float) -> list[Effect]:
        """Drops a new job that the store refused. Nothing of it has begun, and others may have its slots."""
        return self.schedule(now_s, wall_s) if self.jobs.pop(job_id, None) else []

    def unkept(self, job_id: str, sentence: str, now_s: float, wall_s: float) -> list[Effect]:
        """Ends a job whose record has become one that the store refuses, however often it is written.

        No rank of it is started any more, so the record is kept without what only a start needs.
        """
        job = self.jobs.get(job_id)
        if job is None or job.is_brief:
            return []
        job.is_brief = True
        record = job.record
        if job.is_over:
            return self._saved(job)
        record.sentence = sentence
        if record.state in (jobs_pb2.JOB_STATE_QUEUED, jobs_pb2.JOB_STATE_CONNECTING):
            del record.shares[:]
            return [*self._finish(job, wall_s), *self.schedule(now_s, wall_s)]
        record.state = jobs_pb2.JOB_STATE_ENDING
        ended: list[Effect] = []
        for share in record.shares:
            if not share.started and not share.over:  # if its agent has started it nevertheless, it is told to end it
                share.over = True
                before = known(record)
                lines.lose(record, share, job.pids, lines.NOT_STARTED, wall_s)
                ended += rank_ends(record, before)
        end = pb.AgentCommand(end=pb.EndShare(job=job_id))
        ends = [Command(share.agent, end) for share in record.shares if not share.over]
        return [*ended, *ends, *self._judged(job, wall_s), *self.schedule(now_s, wall_s)]

    def submitted(self, submission: str) -> ClusterJob | None:
        """The job that this submission became: a client that got no answer asks again."""
        found = (job for job in self.jobs.values() if submission and job.record.spec.submission == submission)
        return next(found, None)

    def placement(self, spec: jobs_pb2.JobSpec) -> jobs_pb2.JobRecord:
        """Where a job would run if it were submitted now: with its shares, or the sentence why it would wait."""
        record = jobs_pb2.JobRecord(spec=spec)
        wanted = resources_of(spec)
        waiting = self._in_state(jobs_pb2.JOB_STATE_QUEUED)
        able = (job for job in waiting if not isinstance(self._most(resources_of(job.record.spec)), str))
        placed = place(wanted, [self._free(agent) for agent in self._usable()])
        if isinstance(placed, str):
            more = "more hosts" if isinstance(self._most(wanted), str) else "room"
            record.sentence = f"It would wait for {more}: {placed}"
        elif before := next(able, None):
            record.sentence = f"It would wait behind job {before.record.id}."
        else:
            _deal(record, placed)
        return record

    # -- agents ------------------------------------------------------------------------------------------------------

    def refuses(self, register: pb.Register) -> pb.NotRegistered | None:
        """Why this agent can't register now; None when it can."""
        name, here = printable(register.name), f"this coordinator has version {self.version}"
        if register.protocol_version != self.protocol_version or register.version != self.version:
            return pb.NotRegistered(
                sentence=f"The agent of host {name} has Horovod {printable(register.version)} (protocol "
                f"{register.protocol_version}), but {here} (protocol {self.protocol_version}): install the same on "
                "both.",
                final=True,
            )
        known = self.agents.get(register.name)
        if known and known.is_connected and known.register.instance != register.instance:
            return pb.NotRegistered(
                sentence=f"An agent named {name} is registered already, from another process. Give this one another "
                "--name, or wait until the coordinator has seen that the other one is gone."
            )
        return None

    def attach(self, register: pb.Register, now_s: float, wall_s: float) -> list[Effect]:
        """The agent has registered, and `refuses` does not refuse it. Its jobs go on where they are."""
        name = register.name
        known = self.agents.get(name)
        agent = self.agents[name] = Agent(name, register, is_draining=register.draining)
        if known is not None and known.register.instance == register.instance:
            agent.fitness = known.fitness
        agent.fitness.told(printable(register.unfit))
        self.reachability.forget(name)
        effects: list[Effect] = []
        told = {report.job: report for report in register.jobs}
        for job_id, report in told.items():
            job = self.jobs.get(job_id)
            share = job.share_of(name) if job else None
            if job is None or share is None or job.is_over or share.over:
                effects += self._unwanted(name, report)
            else:
                effects += self._reported(job, share, report, now_s, wall_s)
        for job in list(self.jobs.values()):
            share = job.share_of(name)
            if share is None or share.over or job.is_over:
                continue
            if job.record.id in told:
                effects += self._repeated(job, share)
            elif share.started:
                cause = f"the agent of {name} has come back without it; was the host started again?"
                effects += self._lost(job, share, cause, now_s, wall_s)
            elif job.record.state == jobs_pb2.JOB_STATE_RUNNING:
                effects.append(self._start(job, share))
            elif job.record.state == jobs_pb2.JOB_STATE_ENDING:
                effects += self._lost(job, share, "its host was away when it was to start", now_s, wall_s)
        return [*effects, *self.schedule(now_s, wall_s)]

    def detached(self, name: str, instance: str, now_s: float) -> list[Effect]:
        """The agent's stream is over; it may come back."""
        agent = self.agents.get(name)
        if agent is None or agent.register.instance != instance:
            return []
        agent.away_since_s = now_s
        if agent.is_draining and not self._shares_on(name):
            del self.agents[name]
        return []

    def drain(self, name: str) -> list[Effect]:
        self.agents[name].is_draining = True
        return []

    def fitness(self, name: str, unfit: str, now_s: float, wall_s: float) -> list[Effect]:
        """The agent says whether its host can start jobs."""
        fitness, unfit = self.agents[name].fitness, printable(unfit)
        notice = f"Host {name} is set aside: {unfit}." if unfit else f"Host {name} can start jobs again."
        is_news = bool(unfit) != bool(fitness.unfit)
        fitness.told(unfit)
        return [*([Notice(notice)] if is_news else []), *self.schedule(now_s, wall_s)]

    def report(self, name: str, report: pb.JobReport, now_s: float, wall_s: float) -> list[Effect]:
        """What the ranks of a job do on a host."""
        job = self.jobs.get(report.job)
        share = job.share_of(name) if job else None
        if job is None or share is None or job.is_over or share.over:
            return [*self._unwanted(name, report), *self.schedule(now_s, wall_s)]
        return [*self._reported(job, share, report, now_s, wall_s), *self.schedule(now_s, wall_s)]

    def reached(self, name: str, probe: int, targets: Sequence[pb.Target], now_s: float, wall_s: float) -> list[Effect]:
        """The answer to a probe: jobs that waited for it may start."""
        self.reachability.answered(name, probe, [(target.agent, target.address) for target in targets])
        return self.schedule(now_s, wall_s)

    def tick(self, now_s: float, wall_s: float) -> list[Effect]:
        """Finds hosts that are away for too long, and probes that are not answered."""
        effects: list[Effect] = []
        for agent in list(self.agents.values()):
            if agent.away_since_s is None:
                continue
            unseen_s = agent.unseen_s(now_s)
            for job, share in self._shares_on(agent.name):
                grace_s = grace_of(job.record, share, job.attendance, self.away_grace_s)
                if unseen_s >= grace_s:
                    cause = f"host {agent.name} has had no connection to the coordinator for {grace_s:g} s"
                    effects += self._lost(job, share, cause, now_s, wall_s)
            if unseen_s >= self.away_grace_s and not self._shares_on(agent.name):
                del self.agents[agent.name]
        return [*effects, *self.schedule(now_s, wall_s)]

    def doubtful(self) -> list[str]:
        """Jobs with ranks on hosts whose agents are away. The caller tells `attended` of their ranks."""
        away = [agent.name for agent in self.agents.values() if not agent.is_connected]
        return list(dict.fromkeys(job.record.id for name in away for job, _ in self._shares_on(name)))

    def attended(self, job_id: str, attendance: Attendance | None, now_s: float) -> None:
        """Which hosts of the job's world are connected to the coordinator that serves it; None: it can't be told."""
        if (job := self.jobs.get(job_id)) is None:
            return
        job.attendance = attendance
        for name in attendance.connected if attendance is not None else ():
            if (agent := self.agents.get(name)) is not None and job.share_of(name) is not None:
                agent.seen_at_s = now_s

    def _shares_on(self, name: str) -> list[tuple[ClusterJob, jobs_pb2.Share]]:
        """The jobs that have ranks on this host, with their shares there which are not over."""
        found = ((job, job.share_of(name)) for job in self.jobs.values() if not job.is_over)
        return [(job, share) for job, share in found if share is not None and not share.over]

    def restart_limits(self, now_s: float) -> None:
        """This coordinator was stopped for a while: all limits of seconds begin anew."""
        for agent in self.agents.values():
            if agent.away_since_s is not None:
                agent.away_since_s = now_s
        self.reachability.restart_limits(now_s)

    def watches(self, job_id: str, rank: int) -> bool:
        """Whether an agent that is connected will tell how the process of this rank ended."""
        job = self.jobs.get(job_id)
        if job is None or job.is_over or not lines.is_distributed(job.record):
            return False
        share = next((one for one in job.record.shares if rank in one.slots), None)
        agent = self.agents.get(share.agent) if share is not None else None
        return agent is not None and agent.is_connected

    # -- what people ask ---------------------------------------------------------------------------------------------

    def signal(self, job_id: str, signum: int, stop: bool, now_s: float, wall_s: float) -> list[Effect]:
        """Passes a signal on to the ranks; with `stop` the job is to end."""
        job = self.jobs[job_id]
        record = job.record
        if job.is_over:
            return []
        effects: list[Effect] = []
        if stop:
            record.stop_signal = record.stop_signal or signum
            if record.state in (jobs_pb2.JOB_STATE_QUEUED, jobs_pb2.JOB_STATE_CONNECTING):
                del record.shares[:]
                return [*self._finish(job, wall_s), *self.schedule(now_s, wall_s)]
            record.state = jobs_pb2.JOB_STATE_ENDING
            effects += self._saved(job)
        command = pb.AgentCommand(signal=pb.SignalShare(job=job_id, signal=signum, stop=stop))
        return [*effects, *(Command(share.agent, command) for share in record.shares if not share.over)]

    # -- placing -----------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float, wall_s: float) -> list[Effect]:
        """Places what can be placed, in the order of the queue, and says why the rest waits."""
        effects: list[Effect] = []
        for agent in self.agents.values():
            agent.fitness.look(now_s)
        for job in self._in_state(jobs_pb2.JOB_STATE_CONNECTING):
            effects += self._connect(job, now_s, wall_s)
        first_waiting = ""
        for job in self._in_state(jobs_pb2.JOB_STATE_QUEUED):
            wanted = resources_of(job.record.spec)
            if first_waiting:
                effects += self._waits(job, f"It waits behind job {first_waiting}.")
                continue
            placed = place(wanted, [self._free(agent) for agent in self._usable()])
            if isinstance(placed, str):
                if isinstance(most := self._most(wanted), str):
                    effects += self._waits(job, f"It waits for more hosts: {most}{self._set_aside()}")
                else:
                    first_waiting = job.record.id
                    effects += self._waits(job, f"It waits for room: {placed}{self._set_aside()}")
            else:
                effects += self._placed(job, placed, now_s, wall_s)
        return effects

    def _most(self, wanted: Resources) -> Sequence[Part] | str:
        """Where the job would go if no other job ran."""
        return place(wanted, [agent.capacity() for agent in self._usable()])

    def _usable(self) -> list[Agent]:
        return [agent for agent in self._present() if not agent.fitness.aside]

    def _present(self) -> list[Agent]:
        return [agent for agent in self.agents.values() if agent.is_connected and not agent.is_draining]

    def _set_aside(self) -> str:
        """A further sentence for a job that waits; empty when no host is set aside."""
        aside = [f"{agent.name} ({agent.fitness.aside})" for agent in self._present() if agent.fitness.aside]
        return f" Set aside for now: {shortened(aside, 4)}." if aside else ""

    def free_slots(self, name: str) -> int:
        return max(0, self._free(self.agents[name]).slots)

    def _free(self, agent: Agent) -> Capacity:
        whole = agent.capacity()
        slots, gpus, cpus, memory = whole.slots, set(whole.gpus), whole.cpus, whole.memory_bytes
        for job in self.jobs.values():
            share = None if job.is_over else job.share_of(agent.name)
            if share is not None and not share.over:
                needs = job.record.spec.needs
                slots -= lines.slots_of(job.record.spec, len(share.slots))
                gpus -= set(share.gpus)
                cpus -= len(share.slots) * needs.cpus
                memory -= len(share.slots) * needs.memory_bytes
        slots -= sum(agent.strays.values())
        left = tuple(gpu for gpu in whole.gpus if gpu in gpus)
        return Capacity(agent.name, slots, left, max(0.0, cpus), max(0.0, memory), whole.labels)

    def _placed(self, job: ClusterJob, parts: Sequence[Part], now_s: float, wall_s: float) -> list[Effect]:
        record = job.record
        _deal(record, parts)
        for share in record.shares:
            share.orphan_grace_seconds = self.agents[share.agent].register.orphan_grace_seconds
        record.state = jobs_pb2.JOB_STATE_CONNECTING
        record.sentence = record_size.refusal_of_placed(record)
        if record.sentence:
            return self._unplaced(job, wall_s)
        return self._connect(job, now_s, wall_s, is_new=True)

    def _unplaced(self, job: ClusterJob, wall_s: float) -> list[Effect]:
        """Ends a job that was not started, for the reason in its record."""
        del job.record.shares[:]
        job.record.state = jobs_pb2.JOB_STATE_ENDING
        return self._finish(job, wall_s)

    def _connect(self, job: ClusterJob, now_s: float, wall_s: float, is_new: bool = False) -> list[Effect]:
        """Starts the job if its hosts are known to reach each other; asks them otherwise."""
        record = job.record
        agents = [self.agents.get(share.agent) for share in record.shares]
        there = [agent for agent in agents if agent is not None and agent.is_connected]
        found = self.reachability.between(there, now_s)
        effects: list[Effect] = [Command(name, command) for name, command in found.probes]
        if found.unreachable:
            record.sentence = found.unreachable
            record.state = jobs_pb2.JOB_STATE_ENDING
            return [*effects, *self._finish(job, wall_s), *self.schedule(now_s, wall_s)]
        if not found.is_complete or len(there) < len(agents):
            return [*effects, *(self._saved(job) if is_new else [])]
        for share in record.shares:
            share.interfaces[:] = found.interfaces.get(share.agent, ())
        if sentence := record_size.refusal_of_placed(record):
            record.sentence = sentence
            return [*effects, *self._unplaced(job, wall_s), *self.schedule(now_s, wall_s)]
        record.state = jobs_pb2.JOB_STATE_RUNNING
        record.started_at = wall_s
        starts = [self._start(job, share) for share in record.shares]
        return [*effects, *self._saved(job), *starts]

    def _start(self, job: ClusterJob, share: jobs_pb2.Share) -> Command:
        spec = job.record.spec
        host_of = job.hosts()
        places = assign([Seat(str(rank), host) for rank, host in enumerate(host_of)])
        assert not isinstance(places, str)  # only members that ask for a rank can be refused
        each = len(share.gpus) // len(share.slots)
        start = pb.StartShare(
            job=job.record.id,
            command=spec.command,
            environment=spec.environment,
            directory=spec.directory,
            size=spec.processes,
            interfaces=share.interfaces,
            hold=spec.attended,
            lines=spec.lines,
            processes_per_worker=lines.per_worker(spec),
            code=spec.code,
            python_environment=spec.python_environment,
            replaces_failed=spec.policy.replaces_failed,
        )
        for index, rank in enumerate(share.slots):
            at = places[rank]
            start.ranks.add(
                rank=rank,
                local_rank=at.local_rank,
                local_size=at.local_size,
                cross_rank=at.cross_rank,
                cross_size=at.cross_size,
                gpus=share.gpus[index * each : (index + 1) * each],
                incarnation=share.incarnations[index] if share.incarnations else 1,
            )
        return Command(share.agent, pb.AgentCommand(start=start))

    def _waits(self, job: ClusterJob, sentence: str) -> list[Effect]:
        """Sets the sentence why the job waits. It is not saved: another coordinator finds its own."""
        if job.record.sentence == sentence:
            return []
        job.record.sentence = sentence
        return [Changed(job.record.id)]

    # -- what becomes of ranks -----------------------------------------------------------------------------------------

    def _reported(
        self, job: ClusterJob, share: jobs_pb2.Share, report: pb.JobReport, now_s: float, wall_s: float
    ) -> list[Effect]:
        effects: list[Effect] = []
        record = job.record
        if report.over and report.host_fault:
            effects += self._could_not_start(job, share, printable(report.error), now_s)
            if record.state == jobs_pb2.JOB_STATE_QUEUED:
                return effects  # whoever passes the report on calls `schedule` afterwards
        elif report.ranks:
            self.agents[share.agent].fitness.started()
        before, current = known(record), incarnations(record)
        changed = not share.started or report.lines_done > share.lines_done
        share.started = True
        share.lines_done = max(share.lines_done, report.lines_done)
        is_current = lines.is_current(record, report)
        for rank in report.ranks if is_current else ():
            incarnation = rank.incarnation or 1
            if incarnation != current.get(rank.rank):
                continue  # of a process that was replaced; that it has ended is known
            job.pids[rank.rank] = rank.pid
            if rank.ended and (rank.rank, incarnation) not in before:
                outcome = record.outcomes.add(rank=rank.rank, pid=rank.pid, stopped=rank.stopped, ended_at=wall_s)
                if rank.HasField("code"):
                    outcome.code = rank.code
                if incarnation > 1:
                    outcome.incarnation = incarnation
                changed = True
        if report.over and not share.over:
            share.over = changed = True
            if is_current or record.state == jobs_pb2.JOB_STATE_RUNNING:  # else it ended before a line that was to come
                lines.lose(record, share, job.pids, printable(report.error) or lines.NOT_KNOWN, wall_s)
            effects.append(Command(share.agent, pb.AgentCommand(forget=pb.ForgetShare(job=record.id))))
        # First, since it is evidence for the world and no decision that must be stored.
        ended = rank_ends(record, before)
        judged = self._judged(job, wall_s) if changed else []
        return [*ended, *judged, *effects, *self._next_line(job)]

    def _could_not_start(self, job: ClusterJob, share: jobs_pb2.Share, error: str, now_s: float) -> list[Effect]:
        """The host is set aside. The job waits again if no process of it was started anywhere.

        Where it has other hosts, processes may run there by now, and what a program has done can't be taken back.
        """
        record, name = job.record, share.agent
        fitness = self.agents[name].fitness
        fitness.could_not_start(error, now_s)
        seconds = fitness.until_s - now_s
        effects: list[Effect] = [Notice(f"Host {name} is set aside for {seconds:g} s, since it failed: {error}.")]
        record.failed_starts += 1
        waits = record.state == jobs_pb2.JOB_STATE_RUNNING and len(record.shares) == 1 and not record.line
        if waits and record.failed_starts < MOST_STARTS:
            del record.shares[:]
            record.state = jobs_pb2.JOB_STATE_QUEUED
            record.ClearField("started_at")
            forget = pb.AgentCommand(forget=pb.ForgetShare(job=record.id))
            effects += [*self._saved(job), Command(name, forget)]
        return effects

    def _next_line(self, job: ClusterJob) -> list[Effect]:
        record = job.record
        if record.state != jobs_pb2.JOB_STATE_RUNNING or not lines.advance(record):
            return []
        job.pids.clear()
        return [*self._saved(job), *(Command(share.agent, lines.run_line(record)) for share in record.shares)]

    def _judged(self, job: ClusterJob, wall_s: float) -> list[Effect]:
        """Saves a job some of whose ranks have ended; and what that means for the others."""
        record = job.record
        effects: list[Effect] = []
        if record.state == jobs_pb2.JOB_STATE_RUNNING:
            effects = self._decided(job, wall_s)
        if all(share.over for share in record.shares):
            return self._finish(job, wall_s)
        return [*self._saved(job), *effects]

    def _decided(self, job: ClusterJob, wall_s: float) -> list[Effect]:
        """What the agents of a running job are to do, now that processes of it have ended."""
        record = job.record
        replaces = record.spec.policy.replaces_failed
        target, sentence = decide(wall_s, job.target, Observed(exits_of(record)))
        if target is job.target or not (replaces or target.phase is Phase.ENDS):
            return []
        job.obey(target)
        left = [share for share in record.shares if not share.over]
        if replaces:
            record.sentence = sentence
        if target.phase is Phase.ENDS:
            end = pb.AgentCommand(end=pb.EndShare(job=record.id))
            return [Command(share.agent, end) for share in left]
        if target.phase is Phase.FINISHES:
            record.sentence = ""
            finish = pb.AgentCommand(finish=pb.FinishShare(job=record.id))
            return [Command(share.agent, finish) for share in left]
        return [self._start(job, share) for share in left if target.generation in share.incarnations]

    def _lost(self, job: ClusterJob, share: jobs_pb2.Share, cause: str, now_s: float, wall_s: float) -> list[Effect]:
        """The ranks of that share which have not ended are lost. A job that has not been started waits again."""
        if job.record.state == jobs_pb2.JOB_STATE_CONNECTING:
            del job.record.shares[:]
            job.record.state = jobs_pb2.JOB_STATE_QUEUED
            return [*self._saved(job), *self.schedule(now_s, wall_s)]
        share.over = True
        before = known(job.record)
        lines.lose(job.record, share, job.pids, cause, wall_s)
        ended = rank_ends(job.record, before)
        return [*ended, *self._judged(job, wall_s), *self.schedule(now_s, wall_s)]

    def _finish(self, job: ClusterJob, wall_s: float) -> list[Effect]:
        job.finish(wall_s)
        return [*self._saved(job)]

    def _repeated(self, job: ClusterJob, share: jobs_pb2.Share) -> list[Effect]:
        """Repeats the commands that an agent which was away may not have got."""
        policy, is_running = job.record.spec.policy, job.record.state == jobs_pb2.JOB_STATE_RUNNING
        if not share.over and is_running and policy.replaces_failed:
            finish = pb.AgentCommand(finish=pb.FinishShare(job=job.record.id))
            return [Command(share.agent, finish) if job.record.finishes else self._start(job, share)]
        if not share.over and job.record.state == jobs_pb2.JOB_STATE_RUNNING and job.record.line:
            return [Command(share.agent, lines.run_line(job.record))]
        if share.over or job.record.state != jobs_pb2.JOB_STATE_ENDING:
            return []
        if job.record.stop_signal:
            signal = pb.SignalShare(job=job.record.id, signal=job.record.stop_signal, stop=True)
            return [Command(share.agent, pb.AgentCommand(signal=signal))]
        return [Command(share.agent, pb.AgentCommand(end=pb.EndShare(job=job.record.id)))]

    def _unwanted(self, name: str, report: pb.JobReport) -> list[Effect]:
        """Ends what an agent runs although no record asks for it. Its slots are taken until then."""
        agent = self.agents[name]
        running = sum(not rank.ended for rank in report.ranks)
        if report.over or not (running or report.lines_done):  # between two lines no rank runs
            agent.strays.pop(report.job, None)
            return [Command(name, pb.AgentCommand(forget=pb.ForgetShare(job=report.job)))] if report.over else []
        is_new = report.job not in agent.strays
        agent.strays[report.job] = running
        signal = pb.SignalShare(job=report.job, signal=_SIGTERM, stop=True)
        return [Command(name, pb.AgentCommand(signal=signal))] if is_new else []

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _saved(self, job: ClusterJob) -> list[Effect]:
        return [Save(job.record.id, record_size.stored(job.record, job.is_brief)), Changed(job.record.id)]

    def _in_state(self, state: int) -> list[ClusterJob]:
        return sorted(
            (job for job in self.jobs.values() if job.record.state == state), key=lambda job: job.record.number
        )

    def _forget_old(self) -> list[Effect]:
        over = sorted((job for job in self.jobs.values() if job.is_over), key=lambda job: job.record.number)
        old = over[: max(0, len(over) - KEPT_JOBS)]
        for job in old:
            del self.jobs[job.record.id]
        return [Erase(job.record.id) for job in old]


def _deal(record: jobs_pb2.JobRecord, parts: Sequence[Part]) -> None:
    record.generation += 1  # the incarnations stay: where a job is dealt out again, no process of it was started
    for part in parts:
        slots = range(part.first_rank, part.first_rank + part.count)
        record.shares.add(agent=part.host, slots=slots, gpus=part.gpus)


def describe(cluster: Cluster, job_id: str) -> str:
    """For the log: `train-k3f9 is running: ranks 0-3 on h1, ranks 4-7 on h2`."""
    job = cluster.jobs[job_id]
    where = ", ".join(f"{ranks_in_words(share.slots)} on {share.agent}" for share in job.record.shares)
    state = jobs_pb2.JobState.Name(job.record.state).removeprefix("JOB_STATE_").lower()
    if job.record.state == jobs_pb2.JOB_STATE_RUNNING and (line := lines.in_words(job.record)):
        state += f" {line}"
    text = f"Job {job_id} of {plural(job.record.spec.processes, 'rank')} is {state}"
    if not where or job.record.state in OVER:
        return f"{text}. {job.record.sentence}"
    return f"{text}: {where}. {job.record.sentence}".removesuffix(". ")
