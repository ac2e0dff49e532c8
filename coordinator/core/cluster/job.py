"""A job that was submitted to a cluster: its record, the resources that it needs, and how it ended, in a sentence."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from horovod.base.errors import STATE_LOST_EXIT, ClusterCode, LaunchCode, code_of, coded
from horovod.base.words import capitalized, plural, ranks_in_words, uncapitalized
from horovod.coordinator.core.elastic.decision import Target
from horovod.coordinator.core.ending import Attendance, RankEnded, exit_code, explain, first_failure, rank_ended
from horovod.protos.v1 import jobs_pb2

from . import code, job_record, lines
from .effects import Changed, Effect, Save
from .hosts import START_S, readmit
from .job_record import (
    MAX_PROCESSES,
    RankExit,
    incarnation_of,
    is_elastic,
    is_unneeded,
    latest,
    leaving_slots,
    processes_of,
    sizes_of,
)
from .placement import Resources
from .target_record import target_of, write_target

OVER = (jobs_pb2.JOB_STATE_SUCCEEDED, jobs_pb2.JOB_STATE_FAILED, jobs_pb2.JOB_STATE_STOPPED)
MAX_SUBMISSION = 64


@dataclass
class ClusterJob:
    """A job of the cluster. Whatever must survive the coordinator is in `record`, which is written to the store."""

    record: jobs_pb2.JobRecord
    pids: dict[int, int] = field(default_factory=dict)  # rank -> pid, as far as agents have told
    began_s: dict[int, float] = field(default_factory=dict)  # rank -> when its pid was told, by the wall clock
    failed_starts: dict[str, int] = field(default_factory=dict)  # by host; see hosts.py
    is_brief: bool = False  # the store refused the whole record; it has only what is needed to end the job
    attendance: Attendance | None = None  # who of its ranks is connected, as last told; None: not known
    has_joined: bool = True  # one of its processes has joined it, or that is not known
    epoch: int | None = None  # epoch of its latest world; 0: it had none; None: not known
    _target: Target | None = None  # made from the record when it is first asked for

    @property
    def target(self) -> Target:
        """The target of a job that has its hosts."""
        if self._target is None or self._target.generation != self.record.generation:
            self._target = target_of(self.record)
        return self._target

    def obey(self, target: Target) -> None:
        """Writes a new target into the record."""
        write_target(self.record, target)
        self._target = target

    @property
    def is_over(self) -> bool:
        return self.record.state in OVER

    @property
    def is_waiting(self) -> bool:
        """Whether none of it has been started: it waits for room, or until its hosts have found each other."""
        return self.record.state in (jobs_pb2.JOB_STATE_QUEUED, jobs_pb2.JOB_STATE_CONNECTING)

    def share_of(self, agent: str) -> jobs_pb2.Share | None:
        return next((share for share in self.record.shares if share.agent == agent), None)

    def forget_process(self, slot: int) -> None:
        """Another one is to be started there."""
        self.pids.pop(slot, None)
        self.began_s.pop(slot, None)

    def count_start(self, host: str, slot: int, failed: bool, wall_s: float) -> bool:
        """The latest process of that slot has ended: notes, and returns, whether it failed soon after its start."""
        began_s = self.began_s.get(slot)
        has_failed = failed and began_s is not None and wall_s - began_s < START_S
        self.failed_starts[host] = self.failed_starts.get(host, 0) + 1 if has_failed else 0
        return has_failed

    def well(self, wall_s: float) -> Set[int]:
        """The slots whose processes were started a while ago."""
        return {slot for slot, began_s in self.began_s.items() if wall_s - began_s >= START_S}

    @property
    def has_slots(self) -> bool:
        return any(share.slots for share in self.record.shares)

    def hosts(self) -> dict[int, str]:
        """The host of every slot."""
        return hosts_of(self.record)

    def saved(self, is_new: bool = False) -> list[Effect]:
        """Writes the record as it is now, and tells those who follow the job. is_new: it is the first record."""
        job_id = self.record.id
        return [Save(job_id, job_record.stored(self.record, self.is_brief), is_new), Changed(job_id)]

    def may_use_again(self, agent: str) -> list[Effect]:
        """An agent has registered anew, and nothing of the job is left on its host, which was lost."""
        if not self.record.spec.policy.supplied_hosts or self.is_over or not readmit(self.record, agent):
            return []
        return self.saved()

    def cancel(self, wall_s: float) -> list[Effect]:
        """Ends a job of which nothing has been started. If it has not been stopped, its `sentence` says why."""
        del self.record.shares[:]
        return self.finish(wall_s)

    def requeue(self) -> list[Effect]:
        """Takes the job's hosts from it, so that it waits again. No process of it was started."""
        del self.record.shares[:]
        self.record.state = jobs_pb2.JOB_STATE_QUEUED
        return self.saved()

    def finish(self, wall_s: float) -> list[Effect]:
        """The job is over. No rank will be started, so the environment, which may hold secrets, is erased."""
        record = self.record
        record.spec.environment.clear()
        noun, each = ("rank", 1) if lines.is_distributed(record) else ("worker", lines.per_worker(record.spec))
        leaving = leaving_slots(record)  # however their processes end, it says nothing of the job
        waited = {one.slot for one in record.retries if one.at}  # for another process, when others ended well
        but = leaving | waited
        latest_ends = [outcome for outcome in latest(record) if not outcome.drained and outcome.rank not in but]
        latest_ends = [one for one in latest_ends if not lines.failed(one) or not is_unneeded(record, one)]
        ends = [RankExit.of(outcome, each) for outcome in latest_ends]
        record.ended_at = wall_s
        if record.stop_signal:
            record.state = jobs_pb2.JOB_STATE_STOPPED
            record.exit_code = 128 + record.stop_signal
            record.sentence = "It was stopped; no rank is left." if record.shares else "It was stopped while it waited."
        elif failure := next((one for one in ends if one.code == STATE_LOST_EXIT), first_failure(ends)):
            record.state = jobs_pb2.JOB_STATE_FAILED
            record.exit_code = exit_code(failure.code)
            sentence = record.sentence or explain(ends, _hosts_of_all(self.hosts(), each), noun) or ""
            error = code_of(sentence) or code_of(failure.lost) or LaunchCode.RANK_FAILED
            if which := lines.in_words(record):
                sentence = f"{capitalized(which)} failed: {uncapitalized(sentence)}"
            record.sentence = coded(error, sentence)
        elif len(ends) * each < _fewest_ends(record):
            record.state = jobs_pb2.JOB_STATE_FAILED  # `sentence` says why it could not be started
            record.exit_code = 1
        else:
            record.state = jobs_pb2.JOB_STATE_SUCCEEDED
            record.sentence = ""
        return self.saved()


def _fewest_ends(record: jobs_pb2.JobRecord) -> int:
    """How many of the processes must have ended well for the job to have succeeded."""
    if not is_elastic(record.spec):
        return record.spec.processes
    return 0 if record.HasField("work_done") else 1


def hosts_of(record: jobs_pb2.JobRecord) -> dict[int, str]:
    """The host of every slot, in the order of their numbers."""
    return dict(sorted((slot, share.agent) for share in record.shares for slot in share.slots))


def _hosts_of_all(host_of: Mapping[int, str], each: int) -> dict[int, str]:
    """each: how many slots count as one, as those of one worker do."""
    return {slot // each: host for slot, host in host_of.items()}


def describe(record: jobs_pb2.JobRecord) -> str:
    """For the log: `Job train-k3f9 of 8 ranks is running: ranks 0-3 on h1, ranks 4-7 on h2`."""
    shares = (share for share in record.shares if share.slots)
    where = ", ".join(f"{ranks_in_words(share.slots)} on {share.agent}" for share in shares)
    state = jobs_pb2.JobState.Name(record.state).removeprefix("JOB_STATE_").lower()
    if record.state == jobs_pb2.JOB_STATE_RUNNING and (line := lines.in_words(record)):
        state += f" {line}"
    text = f"Job {record.id} of {plural(processes_of(record), 'rank')} is {state}"
    if not where or record.state in OVER:
        return f"{text}. {record.sentence}"
    return f"{text}: {where}. {record.sentence}".removesuffix(". ")


def rank_ends(record: jobs_pb2.JobRecord, but: Set[tuple[int, int]] = frozenset()) -> list[RankEnded]:
    """The outcomes, as events for the job's world. Empty if the processes of the line are in no world.

    but: processes of which that is known already, by slot and incarnation.
    """
    if not lines.is_distributed(record):
        return []
    host_of = hosts_of(record)
    new = (outcome for outcome in record.outcomes if (outcome.rank, incarnation_of(outcome)) not in but)
    found = [outcome for outcome in new if outcome.rank in host_of]
    return [rank_ended(record.id, host_of[outcome.rank], RankExit.of(outcome)) for outcome in found]


def resources_of(spec: jobs_pb2.JobSpec) -> Resources:
    return Resources(
        spec.processes,
        spec.needs.gpus,
        spec.needs.cpus,
        spec.needs.memory_bytes,
        dict(spec.labels),
        tuple((host.name, host.slots) for host in spec.hosts),
        lines.per_worker(spec),
        spec.slots_per_worker,
    )


def refusal_of(spec: jobs_pb2.JobSpec) -> str:
    """Why this job could not be run on any hosts, as a sentence; empty when it could."""
    if sentence := _contradiction(spec):
        return coded(ClusterCode.INVALID_JOB, sentence)
    if spec.code.sha256 and (sentence := code.refusal_of(spec.code)):
        return sentence
    return job_record.refusal_of(spec)


def _contradiction_of_sizes(spec: jobs_pb2.JobSpec) -> str:
    policy = spec.policy
    if not is_elastic(spec):
        return "A job has a greatest number of processes, but no fewest." if policy.most else ""
    sizes = sizes_of(spec)
    if not sizes.fewest <= spec.processes <= sizes.most <= MAX_PROCESSES:
        return (
            f"A job that begins with {plural(spec.processes, 'process')} can't have {sizes.fewest} to {sizes.most} of "
            "them."
        )
    if not 0 <= policy.cooldown_least_seconds <= policy.cooldown_most_seconds < 1e9:
        least_s, most_s = policy.cooldown_least_seconds, policy.cooldown_most_seconds
        return f"A cooldown from {least_s:g} to {most_s:g} seconds makes no sense."
    if not 0 <= policy.leave_seconds < 1e9:
        return f"A grace of {policy.leave_seconds:g} seconds makes no sense."
    if not policy.replaces_failed or lines.per_worker(spec) > 1:
        return "A job whose size changes has failed processes replaced, and workers of one process."
    if policy.spares and policy.most < sizes.fewest + policy.spares:
        return (
            f"Of {policy.most} processes at most, {policy.spares} can't be spare ones: the fewest are {sizes.fewest}."
        )
    if not 0 <= policy.patience_seconds < 1e9:
        return f"A patience of {policy.patience_seconds:g} seconds makes no sense."
    return ""


def _contradiction(spec: jobs_pb2.JobSpec) -> str:
    if not spec.command and not spec.lines:
        return "The job has no command."
    if sentence := lines.refusal_of(spec):
        return sentence
    if not 1 <= spec.processes <= MAX_PROCESSES:
        return f"A job has from 1 to {MAX_PROCESSES} processes, not {spec.processes}."
    if sentence := _contradiction_of_sizes(spec):
        return sentence
    each = lines.per_worker(spec)
    if spec.processes % each:
        return f"{plural(spec.processes, 'process')} can't be dealt out to workers of {each} processes each."
    if len(spec.submission) > MAX_SUBMISSION:
        return f"The submission is named by at most {MAX_SUBMISSION} characters, not {len(spec.submission)}."
    if spec.slots_per_worker and spec.slots_per_worker < each:
        return f"A worker of {plural(each, 'process')} needs as many slots, not {spec.slots_per_worker}."
    if not 0 <= spec.needs.cpus < 1e9:
        return f"{spec.needs.cpus} CPUs for each process make no sense: expected a number from 0 on."
    names = [host.name for host in spec.hosts]
    if len(set(names)) < len(names):
        return "The job names a host twice."
    if spec.hosts and (slots := sum(host.slots for host in spec.hosts)) < spec.processes:
        return f"The job asks for {spec.processes} processes on hosts with {slots} slots."
    return ""
