"""The agents of a cluster and the jobs that people submit to it: which run where, which wait and why, how they end.

        queued ──place──► connecting ──► running ──► succeeded
          │                    │            │
          │                    └────────────┼──► ending ──► failed | stopped
          └──────────────stop───────────────┘

A job is given its hosts and started by scheduler.py; what becomes of it there is in execution.py. When a host whose
agent stays away is lost, and its ranks with it, is in hosts.py; so is which hosts are set aside. The cluster finds the
jobs and agents that an event is about, and has jobs placed after every event that may have made room.

All of it stands in the record of a job, which is saved before anything is done that follows from it. So another
coordinator goes on from the records and from what the agents say when they register: commands are idempotent, and what
an agent runs that no record knows is ended.

Pure: time is an argument, effects are what the caller is to do, in their order (effects.py).
"""

from collections.abc import Iterable, Mapping, Sequence

from horovod.base.errors import ClusterCode, coded, without_code
from horovod.base.words import printable, release_in_words
from horovod.coordinator.core.ending import AGENT_S, Attendance
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2

from . import commands, execution, lines
from .agent import Agent, Reachability
from .effects import Command, Effect, Erase, Notice
from .hosts import grace_of
from .job import ClusterJob
from .job_record import incarnations, leaving_slots
from .scheduler import Scheduler

KEPT_JOBS = 200  # jobs that are over, of which the records are kept


class Cluster:
    """Owns the agents, by name, the jobs, by id, and what is known of which agents reach each other."""

    def __init__(
        self, version: str, protocol_version: int, away_grace_s: float, *, hears_of_worlds: bool = False
    ) -> None:
        """version: of the package; agents must have the same. away_grace_s: a host whose agent is away for longer is
        lost, unless its ranks may live (hosts.py). hears_of_worlds: `joined` is called for each job that has joined.
        """
        self.version = version
        self.agents: dict[str, Agent] = {}
        self.jobs: dict[str, ClusterJob] = {}
        self._protocol_version = protocol_version
        self._away_grace_s = away_grace_s
        self._hears_of_worlds = hears_of_worlds
        self._reachability = Reachability()
        self._scheduler = Scheduler(self.agents, self.jobs, self._reachability)

    # -- records -----------------------------------------------------------------------------------------------------

    def load(self, records: Iterable[jobs_pb2.JobRecord], now_s: float) -> None:
        """Begins with the records of an earlier coordinator. Agents that run their jobs count as away from now on."""
        for record in records:
            job = self.jobs[record.id] = ClusterJob(record)
            for share in record.shares:
                # A job that is over needs its share as well, because what its ranks printed is on that host.
                is_wanted = share.started or not (share.over or job.is_over)
                if is_wanted and share.agent not in self.agents:
                    self.agents[share.agent] = Agent.expected(share.agent, now_s)

    def withdraw(self, job_id: str, now_s: float, wall_s: float) -> list[Effect]:
        """Drops a new job that the store refused. Nothing of it has begun, and others may have its slots."""
        return self._schedule(now_s, wall_s) if self.jobs.pop(job_id, None) else []

    def unkept(self, job_id: str, sentence: str, now_s: float, wall_s: float) -> list[Effect]:
        """Ends a job whose record has become one that the store refuses, however often it is written.

        No rank of it is started any more, so the record is kept without what only a start needs.
        """
        job = self.jobs.get(job_id)
        if job is None or job.is_brief:
            return []
        job.is_brief = True
        if job.is_over:
            return job.saved()
        job.record.sentence = sentence
        effects = job.cancel(wall_s) if job.is_waiting else execution.abandoned(job, wall_s)
        return [*effects, *self._schedule(now_s, wall_s)]

    def _forget_old(self) -> list[Effect]:
        over = sorted((job for job in self.jobs.values() if job.is_over), key=lambda job: job.record.number)
        old = over[: max(0, len(over) - KEPT_JOBS)]
        for job in old:
            del self.jobs[job.record.id]
        return [Erase(job.record.id) for job in old]

    # -- agents ------------------------------------------------------------------------------------------------------

    def refuses(self, register: pb.Register) -> pb.NotRegistered | None:
        """Why this agent can't register now; None when it can."""
        name = printable(register.name)
        if register.protocol_version != self._protocol_version:
            sentence = (
                f"The agent of host {name} has {release_in_words(register.version)} (protocol "
                f"{register.protocol_version}), but the coordinator has Horovod {self.version} (protocol "
                f"{self._protocol_version}), and these do not understand each other. Install releases with the same "
                "first number on both."
            )
            return pb.NotRegistered(sentence=coded(ClusterCode.AGENT_VERSION, sentence), final=True)
        known = self.agents.get(register.name)
        if known and known.is_connected and known.register.instance != register.instance:
            sentence = (
                f"An agent named {name} is registered already, from another process. Give this one another --name, or "
                "wait until the coordinator has seen that the other one is gone."
            )
            return pb.NotRegistered(sentence=coded(ClusterCode.AGENT_NAME_TAKEN, sentence))
        return None

    def attach(self, register: pb.Register, now_s: float, wall_s: float) -> list[Effect]:
        """The agent has registered, and `refuses` does not refuse it. Its jobs go on where they are."""
        name = register.name
        known = self.agents.get(name)
        agent = self.agents[name] = Agent(name, register, is_draining=register.draining)
        if known is not None and known.register.instance == register.instance:
            agent.fitness = known.fitness
        agent.fitness.told(without_code(printable(register.unfit)))
        self._reachability.forget(name)
        effects: list[Effect] = []
        told = {report.job: report for report in register.jobs}
        for job_id, report in told.items():
            job = self.jobs.get(job_id)
            share = job.share_of(name) if job else None
            if job is None or share is None or job.is_over or not _is_of(report, share):
                effects += agent.unwanted(report)
            else:
                effects += execution.reported(job, share, agent, report, now_s, wall_s)
        for job in list(self.jobs.values()):
            share = job.share_of(name)
            if share is None or share.over or job.is_over:
                pass
            elif job.record.id in told and _is_of(told[job.record.id], share):
                effects += commands.repeated(job.record, share, agent.is_draining)
            elif share.started:
                cause = f"the agent of {name} has come back without it; was the host started again?"
                effects += self._lost(job, share, cause, now_s, wall_s)
            elif job.record.state == jobs_pb2.JOB_STATE_RUNNING:
                effects += commands.started(job.record, share)
            elif job.record.state == jobs_pb2.JOB_STATE_ENDING:
                effects += self._lost(job, share, "its host was away when it was to start", now_s, wall_s)
            if job.record.id not in told:
                effects += job.may_use_again(name)
        return [*effects, *self._schedule(now_s, wall_s)]

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
        idle = [job for job, share in self._shares_on(name) if share.started and not share.slots]
        return [Command(name, commands.finish(job.record.id)) for job in idle]

    def slots(self, name: str, slots: int, now_s: float, wall_s: float) -> list[Effect]:
        """The host has so many slots from now on."""
        self.agents[name].register.slots = slots
        self.agents[name].may_have_shrunk = True
        return self._schedule(now_s, wall_s)

    def work_done(self, job_id: str, slots: Mapping[int, int]) -> list[Effect]:
        """The work of an elastic job is done, by the processes of these slots; without slots it goes on after all."""
        job = self.jobs.get(job_id)
        if job is None or job.record.state != jobs_pb2.JOB_STATE_RUNNING:
            return []
        job.record.ClearField("work_done")
        if slots:
            job.record.work_done.slots.extend(slots.keys())
            job.record.work_done.incarnations.extend(slots.values())
        return job.saved()

    def fitness(self, name: str, unfit: str, now_s: float, wall_s: float) -> list[Effect]:
        """The agent says whether its host can start jobs."""
        fitness, unfit = self.agents[name].fitness, without_code(printable(unfit))
        notice = f"Host {name} is set aside: {unfit}." if unfit else f"Host {name} can start jobs again."
        is_news = bool(unfit) != bool(fitness.unfit)
        fitness.told(unfit)
        return [*([Notice(notice)] if is_news else []), *self._schedule(now_s, wall_s)]

    def report(self, name: str, report: pb.JobReport, now_s: float, wall_s: float) -> list[Effect]:
        """What the ranks of a job do on a host."""
        agent, job = self.agents[name], self.jobs.get(report.job)
        share = job.share_of(name) if job else None
        if job is None or share is None or job.is_over or not _is_of(report, share):
            effects: Sequence[Effect] = agent.unwanted(report)
        else:
            effects = execution.reported(job, share, agent, report, now_s, wall_s)
        return [*effects, *self._schedule(now_s, wall_s)]

    def reached(self, name: str, probe: int, targets: Sequence[pb.Target], now_s: float, wall_s: float) -> list[Effect]:
        """The answer to a probe: jobs that waited for it may start."""
        self._reachability.answered(name, probe, [(target.agent, target.address) for target in targets])
        return self._schedule(now_s, wall_s)

    def tick(self, now_s: float, wall_s: float) -> list[Effect]:
        """Finds hosts that are away for too long, and probes that are not answered."""
        effects: list[Effect] = []
        for agent in list(self.agents.values()):
            if agent.away_since_s is None:
                continue
            unseen_s = agent.unseen_s(now_s)
            for job, share in self._shares_on(agent.name):
                grace_s = grace_of(job.record, share, job.attendance, self._away_grace_s)
                if unseen_s >= grace_s:
                    cause = f"host {agent.name} has had no connection to the coordinator for {grace_s:g} s"
                    effects += self._lost(job, share, cause, now_s, wall_s)
            if unseen_s >= self._away_grace_s and not self._shares_on(agent.name):
                del self.agents[agent.name]
        return [*effects, *self._schedule(now_s, wall_s)]

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

    def joined(self, job_id: str, epoch: int) -> None:
        """Processes of the job have joined it. epoch: of its latest world; 0: it has had none."""
        if (job := self.jobs.get(job_id)) is not None:
            job.has_joined, job.epoch = True, epoch

    def replacing(self) -> list[str]:
        """The jobs that run and whose failed processes are replaced."""
        running = (job for job in self.jobs.values() if job.record.state == jobs_pb2.JOB_STATE_RUNNING)
        return [job.record.id for job in running if job.record.spec.policy.replaces_failed]

    def _shares_on(self, name: str) -> list[tuple[ClusterJob, jobs_pb2.Share]]:
        """The jobs that have ranks on this host, with their shares there which are not over."""
        found = ((job, job.share_of(name)) for job in self.jobs.values() if not job.is_over)
        return [(job, share) for job, share in found if share is not None and not share.over]

    def restart_limits(self, now_s: float) -> None:
        """This coordinator was stopped for a while: all limits of seconds begin anew."""
        for agent in self.agents.values():
            if agent.away_since_s is not None:
                agent.away_since_s = now_s
        self._reachability.restart_limits(now_s)

    def agent_s(self, job_id: str, rank: int) -> float:
        """How long to wait for an agent's word how this rank's process ended; 0: no connected one tells."""
        job = self.jobs.get(job_id)
        if job is None or job.is_over or not lines.is_distributed(job.record):
            return 0.0
        share = next((one for one in job.record.shares if rank in one.slots), None)
        agent = self.agents.get(share.agent) if share is not None else None
        if agent is None or not agent.is_connected:
            return 0.0
        promised_s = agent.register.word_seconds
        return promised_s if 0 < promised_s < AGENT_S else AGENT_S  # a promise that is NaN comes out as AGENT_S, too

    def host_goes(self, job_id: str, slot: int, incarnation: int) -> bool:
        """Whether the job gives up a whole host when this process fails there. True also of a process that it has given
        up with its host.
        """
        job = self.jobs.get(job_id)
        if job is None or job.record.state != jobs_pb2.JOB_STATE_RUNNING or not job.record.spec.policy.supplied_hosts:
            return False
        is_leaving = slot in leaving_slots(job.record)
        is_latest = incarnations(job.record).get(slot, incarnation) == incarnation
        return is_latest and not is_leaving and not job.record.finishes

    # -- what people ask ---------------------------------------------------------------------------------------------

    def submit(self, job_id: str, spec: jobs_pb2.JobSpec, now_s: float, wall_s: float) -> list[Effect]:
        """Takes a job that `refusal_of` does not refuse."""
        number = 1 + max((job.record.number for job in self.jobs.values()), default=0)
        record = jobs_pb2.JobRecord(id=job_id, number=number, spec=spec, submitted_at=wall_s)
        job = self.jobs[job_id] = ClusterJob(record)
        if self._hears_of_worlds:
            job.has_joined, job.epoch = False, 0
        return [*job.saved(is_new=True), *self._schedule(now_s, wall_s), *self._forget_old()]

    def submitted(self, submission: str) -> ClusterJob | None:
        """The job that this submission became: a client that got no answer asks again."""
        found = (job for job in self.jobs.values() if submission and job.record.spec.submission == submission)
        return next(found, None)

    def placement(self, spec: jobs_pb2.JobSpec) -> jobs_pb2.JobRecord:
        """Where a job would run if it were submitted now: with its shares, or the sentence why it would wait."""
        return self._scheduler.placement(spec)

    def signal(self, job_id: str, signum: int, stop: bool, now_s: float, wall_s: float) -> list[Effect]:
        """Passes a signal on to the ranks; with `stop` the job is to end."""
        job = self.jobs[job_id]
        record = job.record
        if job.is_over:
            return []
        effects: list[Effect] = []
        if stop:
            record.stop_signal = record.stop_signal or signum
            if job.is_waiting:
                return [*job.cancel(wall_s), *self._schedule(now_s, wall_s)]
            record.state = jobs_pb2.JOB_STATE_ENDING
            if all(share.over for share in record.shares):  # it has lost all its hosts, and waits for others
                return [*job.finish(wall_s), *self._schedule(now_s, wall_s)]
            effects += job.saved()
        return [*effects, *commands.to_each(record, commands.signal(job_id, signum, stop=stop))]

    def free_slots(self, name: str) -> int:
        """How many slots of that agent's host no job takes."""
        return self._scheduler.free_slots(name)

    # -- placing -----------------------------------------------------------------------------------------------------

    def _schedule(self, now_s: float, wall_s: float) -> list[Effect]:
        return self._scheduler.schedule(now_s, wall_s)

    def _lost(self, job: ClusterJob, share: jobs_pb2.Share, cause: str, now_s: float, wall_s: float) -> list[Effect]:
        """The ranks of that share are lost, and others may have its slots."""
        return [*execution.lost(job, share, cause, wall_s), *self._schedule(now_s, wall_s)]


def _is_of(report: pb.JobReport, share: jobs_pb2.Share) -> bool:
    """Whether the report is about this share, which is not over, and not about an earlier one of the same host."""
    return not share.over and report.share == share.generation
