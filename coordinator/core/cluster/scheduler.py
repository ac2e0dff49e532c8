"""Gives jobs their hosts, in the order of the queue, and starts them there.

        queued ──there is room for all of its ranks──► connecting ──its hosts reach each other──► running
                                                           └──they do not──► failed

The queue is first in, first out: a job waits for those before it, except for one that not even an empty cluster could
hold. While one waits for room, none grows, and those that have more slots than they asked for give them back. A job
that spans hosts is connecting while they find out over which interfaces they reach each other (agent.py).

The cluster owns the agents, the jobs and what is known of their reachability (cluster.py), and adds and drops them. The
scheduler changes jobs that wait, ends the time for which a host is set aside, and asks what is not known yet of who
reaches whom.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from horovod.base.words import plural, shortened
from horovod.coordinator.core.elastic.decision import Observed, Phase, decide
from horovod.protos.v1 import jobs_pb2

from . import commands, execution, job_record, lines
from .agent import Agent, Reachability
from .effects import Changed, Coming, Command, Effect
from .hosts import is_aside, was_aside
from .job import ClusterJob, resources_of
from .job_record import MAX_PROCESSES, is_elastic, sizes_of
from .placement import Capacity, Lent, Part, Resources, is_of_use, natural, place, processes_that_fit, to_take_back
from .target_record import gpus_of


class Scheduler:
    """Of the agents and jobs of one cluster, by name and by id."""

    def __init__(self, agents: Mapping[str, Agent], jobs: Mapping[str, ClusterJob], reachability: Reachability) -> None:
        self._agents = agents
        self._jobs = jobs
        self._reachability = reachability

    def schedule(self, now_s: float, wall_s: float) -> list[Effect]:
        """Places what can be placed, in the order of the queue, and says why the rest waits."""
        effects: list[Effect] = []
        for agent in self._agents.values():
            agent.fitness.look(now_s)
            if agent.is_connected and agent.may_have_shrunk:
                effects += self._shrunk(agent, wall_s)
        # A job that fails while it is placed has others placed in its room, by a call of this within this one.
        for job in self._in_state(jobs_pb2.JOB_STATE_CONNECTING):
            if job.record.state == jobs_pb2.JOB_STATE_CONNECTING:
                effects += self._connect(job, now_s, wall_s)
        queued, waits_for_room = self._queued(now_s, wall_s)
        effects += queued
        for job in self._in_state(jobs_pb2.JOB_STATE_RUNNING):
            if job.record.spec.policy.replaces_failed:
                effects += execution.looked_at(job, wall_s)
            if is_elastic(job.record.spec):
                # A waiting job comes before a running one that would only grow.
                effects += [] if waits_for_room else self._grown(job, now_s, wall_s)
        return effects

    def _queued(self, now_s: float, wall_s: float) -> tuple[list[Effect], bool]:
        """Places the jobs that wait, as far as there is room. Whether one has to wait for more room is the second part
        of the answer.
        """
        effects: list[Effect] = []
        first_waiting = ""
        for job in self._in_state(jobs_pb2.JOB_STATE_QUEUED):
            if job.record.state != jobs_pb2.JOB_STATE_QUEUED:
                continue
            wanted = resources_of(job.record.spec)
            if first_waiting:
                effects += _waits(job, f"It waits behind job {first_waiting}.")
                continue
            placed = self._place(job.record.spec, wanted)
            if isinstance(placed, str):
                if isinstance(most := self._most(wanted), str):
                    effects += _waits(job, f"It waits for more hosts: {most}{self._set_aside()}")
                else:
                    first_waiting = job.record.id
                    effects += self._take_back(job, wall_s)
                    effects += _waits(job, f"It waits for room: {placed}{self._leaving()}{self._set_aside()}")
            else:
                effects += self._placed(job, placed, now_s, wall_s)
        return effects, bool(first_waiting)

    def placement(self, spec: jobs_pb2.JobSpec) -> jobs_pb2.JobRecord:
        """Where a job would run if it were submitted now: with its shares, or the sentence why it would wait."""
        record = jobs_pb2.JobRecord(spec=spec)
        wanted = resources_of(spec)
        waiting = self._in_state(jobs_pb2.JOB_STATE_QUEUED)
        able = (job for job in waiting if not isinstance(self._most(resources_of(job.record.spec)), str))
        placed = self._place(spec, wanted)
        if isinstance(placed, str):
            more = "more hosts" if isinstance(self._most(wanted), str) else "room"
            record.sentence = f"It would wait for {more}: {placed}"
        elif before := next(able, None):
            record.sentence = f"It would wait behind job {before.record.id}."
        else:
            _deal(record, placed)
        return record

    def free_slots(self, name: str) -> int:
        return max(0, self._free(self._agents[name]).slots)

    def _place(self, spec: jobs_pb2.JobSpec, wanted: Resources) -> Sequence[Part] | str:
        """Where the job can go now. An elastic one gets as many slots as it may have, if there is room for them."""
        free = [self._free(agent) for agent in self._usable()]
        wanted = _on_hosts_there(spec, wanted, free)
        placed = place(wanted, free)
        if isinstance(placed, str) or not is_elastic(spec):
            return placed
        room = sum(processes_that_fit(wanted, host) for host in free)
        for count in range(min(sizes_of(spec).most, room), wanted.processes, -1):
            if not isinstance(more := place(replace(wanted, processes=count), free), str):
                return more
        return placed

    # -- room --------------------------------------------------------------------------------------------------------

    def _most(self, wanted: Resources) -> Sequence[Part] | str:
        """Where the job would go if no other job ran."""
        return place(wanted, [agent.capacity() for agent in self._usable()])

    def _usable(self) -> list[Agent]:
        return [agent for agent in self._present() if not agent.fitness.aside]

    def _present(self) -> list[Agent]:
        return [agent for agent in self._agents.values() if agent.is_connected and not agent.is_draining]

    def _set_aside(self) -> str:
        """A further sentence for a job that waits; empty when no host is set aside."""
        aside = [f"{agent.name} ({agent.fitness.aside})" for agent in self._present() if agent.fitness.aside]
        return f" Set aside for now: {shortened(aside, 4)}." if aside else ""

    def _slots_taken(self) -> Mapping[str, int]:
        """By agent. To be asked before `_free`, which takes longer, where there are many hosts."""
        taken: dict[str, int] = {}
        for job in self._jobs.values():
            for share in () if job.is_over else job.record.shares:
                many = 0 if share.over else lines.slots_of(job.record.spec, len(share.slots))
                taken[share.agent] = taken.get(share.agent, 0) + many
        return taken

    def _free(self, agent: Agent, soon: bool = False) -> Capacity:
        """What no job has of that host. soon: or what none will have when those slots are gone that are to leave."""
        whole = agent.capacity()
        slots, gpus, cpus, memory = whole.slots, set(whole.gpus), whole.cpus, whole.memory_bytes
        for job in self._jobs.values():
            share = None if job.is_over else job.share_of(agent.name)
            if share is not None and not share.over:
                needs = job.record.spec.needs
                taken = {slot: own for slot, own in gpus_of(share).items() if not (soon and slot in share.leaving)}
                slots -= lines.slots_of(job.record.spec, len(taken))
                gpus.difference_update(*taken.values())
                cpus -= len(taken) * needs.cpus
                memory -= len(taken) * needs.memory_bytes
        slots -= sum(agent.strays.values())
        left = tuple(gpu for gpu in whole.gpus if gpu in gpus)
        return Capacity(agent.name, slots, left, max(0.0, cpus), max(0.0, memory), whole.labels)

    # -- slots that go back ------------------------------------------------------------------------------------------

    def _take_back(self, waiting: ClusterJob, wall_s: float) -> list[Effect]:
        """Takes slots back, as many as that job needs, from those that have more than they asked for."""
        free = [self._free(agent, soon=True) for agent in self._usable()]
        wanted = _on_hosts_there(waiting.record.spec, resources_of(waiting.record.spec), free)
        useful = {agent.name for agent in self._usable() if is_of_use(wanted, agent.capacity())}
        jobs = {job.record.id: job for job in reversed(self._in_state(jobs_pb2.JOB_STATE_RUNNING))}
        lent = [one for job in jobs.values() for one in _lent(job, useful)]
        back: dict[str, list[int]] = {}
        for one in to_take_back(wanted, free, lent):
            back.setdefault(one.job, []).append(one.number)
        why = f"job {waiting.record.id} waits for room"
        return [effect for job, slots in back.items() for effect in execution.give_back(jobs[job], slots, why, wall_s)]

    def _shrunk(self, agent: Agent, wall_s: float) -> list[Effect]:
        """Takes slots from jobs whose size may change where the host has fewer than it had. A job that has not begun
        there waits again.
        """
        effects: list[Effect] = []
        agent.may_have_shrunk = False
        many = -(self._free(agent, soon=True).slots + sum(agent.strays.values()))
        for job in reversed(self._in_state(jobs_pb2.JOB_STATE_CONNECTING)) if many > 0 else ():
            if many > 0 and (share := job.share_of(agent.name)) is not None:
                many -= lines.slots_of(job.record.spec, len(share.slots))
                effects += job.requeue()
        for job in reversed(self._in_state(jobs_pb2.JOB_STATE_RUNNING)) if many > 0 else ():
            if not is_elastic(job.record.spec):
                continue
            each = lines.slots_of(job.record.spec, 1)
            own = [slot.number for slot in reversed(job.target.staying) if slot.host == agent.name]
            if back := own[: math.ceil(max(0, many) / each)]:
                many -= len(back) * each
                why = f"host {agent.name} has {plural(agent.register.slots, 'slot')} now"
                effects += execution.give_back(job, back, why, wall_s)
        return effects

    def _leaving(self) -> str:
        """A further sentence for a job that waits."""
        is_any = any(share.leaving for job in self._jobs.values() if not job.is_over for share in job.record.shares)
        return " Other jobs are giving slots back." if is_any else ""

    # -- one job -----------------------------------------------------------------------------------------------------

    def _in_state(self, state: int) -> list[ClusterJob]:
        """In the order in which they were submitted."""
        found = (job for job in self._jobs.values() if job.record.state == state)
        return sorted(found, key=lambda job: job.record.number)

    def _placed(self, job: ClusterJob, parts: Sequence[Part], now_s: float, wall_s: float) -> list[Effect]:
        record = job.record
        _deal(record, parts)
        for share in record.shares:
            share.orphan_grace_seconds = self._agents[share.agent].register.orphan_grace_seconds
        record.state = jobs_pb2.JOB_STATE_CONNECTING
        record.sentence = job_record.refusal_of_placed(record)
        if record.sentence:
            return job.cancel(wall_s)
        return self._connect(job, now_s, wall_s, is_new=True)

    def _connect(self, job: ClusterJob, now_s: float, wall_s: float, is_new: bool = False) -> list[Effect]:
        """Starts the job if its hosts are known to reach each other; asks them otherwise."""
        record = job.record
        agents = [self._agents.get(share.agent) for share in record.shares]
        there = [agent for agent in agents if agent is not None and agent.is_connected]
        found = self._reachability.between(there, now_s)
        effects: list[Effect] = [Command(name, command) for name, command in found.probes]
        if found.unreachable:
            record.sentence = found.unreachable
            return [*effects, *job.finish(wall_s), *self.schedule(now_s, wall_s)]
        if not found.is_complete or len(there) < len(agents):
            return [*effects, *(job.saved() if is_new else [])]
        for share in record.shares:
            share.interfaces[:] = found.interfaces.get(share.agent, ())
        if sentence := job_record.refusal_of_placed(record):
            record.sentence = sentence
            return [*effects, *job.cancel(wall_s), *self.schedule(now_s, wall_s)]
        record.state = jobs_pb2.JOB_STATE_RUNNING
        record.started_at = wall_s
        starts = [Command(share.agent, commands.start(record, share)) for share in record.shares]
        return [*effects, *job.saved(), *starts]

    def _grown(self, job: ClusterJob, now_s: float, wall_s: float) -> list[Effect]:
        """Gives a running job that has fewer processes than it may have further ones, on one host with room for it."""
        record, effects = job.record, list[Effect]()
        missing = job.target.rules.most - len(job.target.slots)
        if record.state != jobs_pb2.JOB_STATE_RUNNING or job.target.phase is not Phase.RUNS or missing <= 0:
            return []
        there = [self._agents[share.agent] for share in record.shares if share.slots and share.agent in self._agents]
        taken, each = self._slots_taken(), lines.slots_of(record.spec, 1)
        for agent in sorted(self._usable(), key=lambda one: natural(one.name)):
            if agent.register.slots - taken.get(agent.name, 0) < each:
                continue
            # An earlier share on that host must be gone first, with its processes.
            if is_aside(record, agent.name, wall_s) or record.id in agent.strays:
                continue
            share = job.share_of(agent.name)
            wanted = replace(resources_of(record.spec), processes=1)
            most = processes_that_fit(wanted, self._free(agent))
            already = len(share.slots) if share is not None else 0
            if (count := min(missing, most, _may_have(record.spec, agent.name) - already)) <= 0:
                continue
            if share is not None and not share.over and share.slots:
                return [*effects, *self._grow(job, agent, count, {}, wall_s)]
            found = self._reachability.between([*there, agent], now_s)
            effects += [Command(name, command) for name, command in found.probes]
            if not found.is_complete or found.unreachable or not _share_interfaces(record, found.interfaces):
                continue
            return [*effects, *self._grow(job, agent, count, found.interfaces, wall_s)]
        return effects

    def _grow(
        self, job: ClusterJob, agent: Agent, count: int, interfaces: Mapping[str, Sequence[str]], wall_s: float
    ) -> list[Effect]:
        record = job.record
        target, sentence = decide(wall_s, job.target, Observed(room={agent.name: count}))
        slots = [slot for slot in target.slots if slot.number not in job.target.by_number]
        if not slots:
            return []
        before = jobs_pb2.JobRecord()
        before.CopyFrom(record)
        gpus = self._free(agent).gpus[: len(slots) * record.spec.needs.gpus]
        share = job.share_of(agent.name)
        if share is not None and share.over:  # it was given back whole; what was printed there is not read any more
            record.shares.remove(share)
            share = None
        if share is None:
            share = record.shares.add(agent=agent.name, generation=share_number(target.generation))
            share.orphan_grace_seconds = agent.register.orphan_grace_seconds
        if not share.slots:
            share.interfaces[:] = interfaces.get(agent.name, ())
        share.slots.extend(slot.number for slot in slots)
        share.gpus.extend(gpus)
        if job_record.refusal_of_placed(record):  # it is as large as a record can be
            record.CopyFrom(before)
            return []
        job.obey(target)
        for slot in slots:
            job.forget_process(slot.number)
        again = f"Host {agent.name} is used again. " if was_aside(record, agent.name) else ""
        record.sentence = again + sentence
        return [*job.saved(), Command(agent.name, commands.start(record, share)), Coming(record.id, len(slots))]


def _on_hosts_there(spec: jobs_pb2.JobSpec, wanted: Resources, hosts: Sequence[Capacity]) -> Resources:
    """Of a job whose size may change: the hosts that it names and that are not there may come later."""
    if not is_elastic(spec) or not wanted.hosts:
        return wanted
    names = {host.name for host in hosts}
    there = tuple((name, slots) for name, slots in wanted.hosts if name in names)
    if spec.policy.supplied_hosts:
        named = {name for name, _ in there}
        there += tuple((host.name, host.slots) for host in hosts if host.name not in named)
    return replace(wanted, hosts=there or wanted.hosts)


def _lent(job: ClusterJob, hosts: Set[str]) -> list[Lent]:
    """The slots on these hosts that the job may lose, the last ones first."""
    spec = job.record.spec
    if not is_elastic(spec) or spec.policy.keeps_slots or job.target.phase is not Phase.RUNS:
        return []
    gpus = {slot: own for share in job.record.shares for slot, own in gpus_of(share).items()}
    extra = max(0, len(job.target.staying) - spec.processes)
    slots = [slot for slot in reversed(job.target.staying) if slot.host in hosts][:extra]
    each, needs = lines.slots_of(spec, 1), spec.needs
    return [
        Lent(
            job.record.id,
            slot.number,
            Capacity(slot.host, each, tuple(gpus.get(slot.number, ())), needs.cpus, needs.memory_bytes),
        )
        for slot in slots
    ]


def _may_have(spec: jobs_pb2.JobSpec, host: str) -> int:
    """So many processes may the job have on that host at most."""
    if not spec.hosts or spec.policy.supplied_hosts:
        return MAX_PROCESSES
    return next((one.slots for one in spec.hosts if one.name == host), 0)


def _share_interfaces(record: jobs_pb2.JobRecord, found: Mapping[str, Sequence[str]]) -> bool:
    """Whether each host that has processes of the job is reached from a further one over interfaces on which they
    listen.
    """
    return all(
        set(share.interfaces) & set(found.get(share.agent, ()))
        for share in record.shares
        if share.interfaces and share.slots
    )


def _waits(job: ClusterJob, sentence: str) -> list[Effect]:
    """Sets the sentence why the job waits. It is not saved: another coordinator finds its own."""
    if job.record.sentence == sentence:
        return []
    job.record.sentence = sentence
    return [Changed(job.record.id)]


def _deal(record: jobs_pb2.JobRecord, parts: Sequence[Part]) -> None:
    record.generation += 1  # the incarnations stay: where a job is dealt out again, no process of it was started
    for part in parts:
        slots = range(part.first_rank, part.first_rank + part.count)
        record.shares.add(agent=part.host, slots=slots, gpus=part.gpus, generation=share_number(record.generation))


def share_number(generation: int) -> int:
    """The `generation` of a share that a host gets with this generation of the target."""
    return generation if generation > 1 else 0
