"""What a cluster consists of: an agent as its coordinator sees it, and a job that was submitted."""

from collections.abc import Set
from dataclasses import dataclass, field

from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2

from . import code, lines
from .ending import RankEnded, exit_code, explain, first_failure, rank_ended
from .placement import Room, Wish
from .words import capitalized, plural, uncapitalized

OVER = (jobs_pb2.JOB_STATE_SUCCEEDED, jobs_pb2.JOB_STATE_FAILED, jobs_pb2.JOB_STATE_STOPPED)
MAX_SUBMISSION = 64
NOT_SERVING = "Another coordinator of this store serves agents and jobs."
MAX_PROCESSES = 1 << 16


@dataclass
class Agent:
    name: str
    register: pb.Register
    away_since_s: float | None = None  # None: it is connected
    is_draining: bool = False
    strays: dict[str, int] = field(default_factory=dict)  # ranks that run there for jobs without a record

    @classmethod
    def expected(cls, name: str, now_s: float) -> "Agent":
        """One that has not registered with this coordinator yet."""
        return cls(name, pb.Register(name=name), away_since_s=now_s)

    @property
    def is_connected(self) -> bool:
        return self.away_since_s is None

    def room(self) -> Room:
        """What it has for jobs when it runs nothing."""
        own = self.register
        return Room(self.name, own.slots, tuple(own.gpus), own.cpus, own.memory_bytes, dict(own.labels))


@dataclass(frozen=True)
class Ended:
    """How a rank ended, as ending.py wants it."""

    rank: int
    pid: int
    code: int | None
    stopped: bool
    ended_s: float
    lost: str

    @classmethod
    def of(cls, outcome: jobs_pb2.RankOutcome, each: int = 1) -> "Ended":
        """each: how many ranks share a number here."""
        code = outcome.code if outcome.HasField("code") else None
        return cls(outcome.rank // each, outcome.pid, code, outcome.stopped, outcome.ended_at, outcome.lost)


@dataclass
class Submitted:
    """A job. Everything that must survive its coordinator stands in `record`."""

    record: jobs_pb2.JobRecord
    pids: dict[int, int] = field(default_factory=dict)  # by rank, as far as agents have told

    @property
    def is_over(self) -> bool:
        return self.record.state in OVER

    def share_of(self, agent: str) -> jobs_pb2.Share | None:
        return next((share for share in self.record.shares if share.agent == agent), None)

    def hosts(self) -> list[str]:
        """The host of every rank, by rank."""
        return [share.agent for share in self.record.shares for _ in range(share.ranks)]

    def finish(self, wall_s: float) -> None:
        """Every rank has ended, or none was started. What may hold secrets is erased: no rank is started any more."""
        record = self.record
        record.spec.environment.clear()
        noun, each = ("rank", 1) if lines.is_distributed(record) else ("worker", lines.per_worker(record.spec))
        ends = [Ended.of(outcome, each) for outcome in record.outcomes]
        record.ended_at = wall_s
        if record.stop_signal:
            record.state = jobs_pb2.JOB_STATE_STOPPED
            record.exit_code = 128 + record.stop_signal
            record.sentence = "It was stopped; no rank is left." if record.shares else "It was stopped while it waited."
        elif failure := first_failure(ends):
            record.state = jobs_pb2.JOB_STATE_FAILED
            record.exit_code = exit_code(failure.code)
            record.sentence = explain(ends, self.hosts()[::each], noun) or ""
            if which := lines.in_words(record):
                record.sentence = f"{capitalized(which)} failed: {uncapitalized(record.sentence)}"
        elif len(ends) * each < record.spec.processes:
            record.state = jobs_pb2.JOB_STATE_FAILED  # `sentence` says why it could not be started
            record.exit_code = 1
        else:
            record.state = jobs_pb2.JOB_STATE_SUCCEEDED
            record.sentence = ""


def rank_ends(record: jobs_pb2.JobRecord, ranks: Set[int]) -> list[RankEnded]:
    """What the outcomes of these ranks are for their world; nothing in a line whose processes are in none."""
    if not lines.is_distributed(record):
        return []
    host_of = [share.agent for share in record.shares for _ in range(share.ranks)]
    found = [outcome for outcome in record.outcomes if outcome.rank in ranks and outcome.rank < len(host_of)]
    return [rank_ended(record.id, host_of[outcome.rank], Ended.of(outcome)) for outcome in found]


def wish_of(spec: jobs_pb2.JobSpec) -> Wish:
    return Wish(
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
    """Why this could not be run on any hosts, as a sentence; empty when it may be."""
    if not spec.command and not spec.lines:
        return "The job has no command."
    if sentence := lines.refusal_of(spec):
        return sentence
    if not 1 <= spec.processes <= MAX_PROCESSES:
        return f"A job has from 1 to {MAX_PROCESSES} processes, not {spec.processes}."
    if spec.code.sha256 and (sentence := code.refusal_of(spec.code)):
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
