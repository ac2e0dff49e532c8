"""What the record of a job says of its processes: how many, and how they ended; and how large it may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from horovod.base.errors import STATE_LOST_EXIT, ClusterCode, coded, coded_like, without_code
from horovod.protos.v1 import jobs_pb2

MAX_PROCESSES = 1 << 16


@dataclass(frozen=True)
class Sizes:
    """Of a job of a fixed size, both numbers are that size."""

    fewest: int
    most: int


def is_elastic(spec: jobs_pb2.JobSpec) -> bool:
    """Whether the number of its processes may change while it runs."""
    return spec.policy.fewest > 0


def sizes_of(spec: jobs_pb2.JobSpec) -> Sizes:
    if not is_elastic(spec):
        return Sizes(spec.processes, spec.processes)
    return Sizes(spec.policy.fewest, spec.policy.most or MAX_PROCESSES)


def processes_of(record: jobs_pb2.JobRecord) -> int:
    """As many as it has now, or asks for while it waits."""
    return sum(len(share.slots) for share in record.shares) or record.spec.processes


# How processes of a job ended, as its record says; and which of that counts: the latest process of each slot.


def incarnations(record: jobs_pb2.JobRecord) -> Mapping[int, int]:
    """The incarnation of each slot, by its number."""
    return {
        number: incarnation
        for share in record.shares
        for number, incarnation in zip(share.slots, share.incarnations or [1] * len(share.slots), strict=True)
    }


def leaving_slots(record: jobs_pb2.JobRecord) -> Set[int]:
    """Those whose processes were asked to end, so that others may have the slots."""
    return {number for share in record.shares for number in share.leaving}


def incarnation_of(outcome: jobs_pb2.RankOutcome) -> int:
    """That of the process which has ended."""
    return outcome.incarnation or 1


@dataclass(frozen=True)
class RankExit:
    """How a rank of the job ended, in the form that ending.py takes (its protocol Outcome)."""

    rank: int
    pid: int
    code: int | None
    stopped: bool
    ended_s: float
    lost: str
    incarnation: int

    @classmethod
    def of(cls, outcome: jobs_pb2.RankOutcome, each: int = 1) -> RankExit:
        """each: how many ranks count as one here, as those of one worker do."""
        code = outcome.code if outcome.HasField("code") else None
        rank, incarnation = outcome.rank // each, incarnation_of(outcome)
        return cls(rank, outcome.pid, code, outcome.stopped, outcome.ended_at, outcome.lost, incarnation)


def latest(record: jobs_pb2.JobRecord) -> Sequence[jobs_pb2.RankOutcome]:
    """Without processes that others have replaced."""
    if not record.spec.policy.replaces_failed:
        return record.outcomes
    current = incarnations(record)
    return [one for one in record.outcomes if current.get(one.rank) == incarnation_of(one)]


def is_unneeded(record: jobs_pb2.JobRecord, outcome: jobs_pb2.RankOutcome) -> bool:
    """Whether it does not matter how this process has ended: the work was done, without it or before it was lost with
    its host. Also where it found the work lost, and others have ended well: no coordinator heard them say that it was
    done.
    """
    if outcome.code == STATE_LOST_EXIT and any(one.HasField("code") and not one.code for one in latest(record)):
        return True
    done = record.work_done
    finished = (outcome.rank, incarnation_of(outcome)) in zip(done.slots, done.incarnations, strict=False)
    return record.HasField("work_done") and (not finished or bool(outcome.lost))


def known(record: jobs_pb2.JobRecord) -> set[tuple[int, int]]:
    """The processes that have ended: slot and incarnation of each."""
    return {(one.rank, incarnation_of(one)) for one in record.outcomes}


def forget_replaced(record: jobs_pb2.JobRecord) -> None:
    """Keeps, of the processes of a slot that others have replaced, the last one alone, so that a record stays small."""
    current = incarnations(record)
    kept: dict[int, int] = {}  # slot -> the incarnation of its last replaced process
    for one in record.outcomes:
        if incarnation_of(one) < current.get(one.rank, 0):
            kept[one.rank] = max(kept.get(one.rank, 0), incarnation_of(one))
    # Outcomes of slots that the job has given up are kept when they may explain why processes on other hosts end soon
    # after.
    keeps_all = record.spec.policy.supplied_hosts
    wanted = [
        one
        for one in record.outcomes
        if (keeps_all or one.rank in current) and incarnation_of(one) >= kept.get(one.rank, 0)
    ]
    if len(wanted) < len(record.outcomes):
        copies = jobs_pb2.JobRecord(outcomes=wanted)
        del record.outcomes[:]
        record.outcomes.extend(copies.outcomes)


# How large the record of a job may be, so that every state of the job can be written to any store.
#
# A record grows while the job runs: the hosts on which it runs, how each process ended, what people are told. So a job
# is taken only if its description leaves room for the shortest form of all that, and a record that is longer than a
# store takes is written in that form (`stored`). The coordinator that made it goes on with all of it in memory.

MAX_RECORD_BYTES = 1_450_000  # what a store takes (store/base.py), without the key
_OUTCOME_BYTES = 32  # bytes of one process's outcome in the shortest form
_SLOT_BYTES = 4  # bytes of its slot in a share
# Bytes of a replaced process, of the incarnations of both processes, and of a slot that is to leave.
_REPLACED_BYTES = _OUTCOME_BYTES + 3 + 4 + 3
_SHARE_BYTES = 16  # bytes by which a share grows while its ranks run
_TOLD_BYTES = 100_000  # bytes for sentences
_MAX_SENTENCE = 8000  # characters in the shortest form
_TOLD_LOSSES = 50  # outcomes in the shortest form that say why a process is lost; the first one is what people ask for
_MAX_CAUSE = 300
_UNTOLD = "?"

LISTED_BYTES = 64 << 10  # bytes of one record in a listing, which has many


def room_for(processes: int, shares: int = 0, replaces_failed: bool = False) -> int:
    """How many bytes description and hosts may have in the record of a job of so many processes."""
    each = _OUTCOME_BYTES + (_REPLACED_BYTES if replaces_failed else 0)
    return MAX_RECORD_BYTES - _TOLD_BYTES - each * processes - _SHARE_BYTES * shares


def refusal_of(spec: jobs_pb2.JobSpec) -> str:
    """Why a job of this description could not be recorded, as a sentence; empty when it can."""
    room = room_for(spec.processes, replaces_failed=spec.policy.replaces_failed) - _SLOT_BYTES * spec.processes
    size = spec.ByteSize()
    if size <= room:
        return ""
    if room <= 0:
        sentence = f"A job of {spec.processes} processes can't be recorded: start it in parts."
        return coded(ClusterCode.JOB_TOO_LARGE, sentence)
    parts = {
        "environment": sum(len(name.encode()) + len(value.encode()) for name, value in spec.environment.items()),
        "command": sum(len(word.encode()) for word in spec.command),
        "run list": sum(line.ByteSize() for line in spec.lines),
        "list of hosts": sum(host.ByteSize() for host in spec.hosts),
    }
    largest = max(parts, key=lambda name: parts[name])
    remedy = "Put long values into a file."
    if largest == "environment":
        longest = max(spec.environment, key=lambda name: len(spec.environment[name]))
        remedy = f"Remove variables that the job does not need, as in `env -u {longest[:100]} horovodrun ...`."
    return coded(
        ClusterCode.JOB_TOO_LARGE,
        f"The description of the job has {size:,} bytes, {parts[largest]:,} of them in its {largest}: with "
        f"{spec.processes} process(es) it may have {room:,}. {remedy}",
    )


def refusal_of_placed(record: jobs_pb2.JobRecord) -> str:
    """The same for a job that has been given its hosts."""
    size = record.ByteSize()
    processes = processes_of(record)
    room = room_for(processes, len(record.shares), record.spec.policy.replaces_failed)
    if size <= room:
        return ""
    return coded(
        ClusterCode.JOB_TOO_LARGE,
        f"It can't be recorded: its description and the names of its {len(record.shares)} hosts, of their GPUs and "
        f"interfaces have {size:,} bytes, but with {processes} process(es) a job may have "
        f"{max(0, room):,}.",
    )


def stored(record: jobs_pb2.JobRecord, is_brief: bool = False) -> bytes:
    """The form that is stored: the whole record, or the shortest form. is_brief: without what only a start needs."""
    if is_brief:
        record = _short(record)
    elif record.ByteSize() > MAX_RECORD_BYTES:
        record = _shortest(record)
    return record.SerializeToString(deterministic=True)


def listed(record: jobs_pb2.JobRecord) -> jobs_pb2.JobRecord:
    """The form for a listing, which shortens a long record. May be `record` itself."""
    return record if record.ByteSize() <= LISTED_BYTES else _short(record)


def _short(record: jobs_pb2.JobRecord) -> jobs_pb2.JobRecord:
    """The shortest form: the fields that people read, and the hosts whose agents must be told to end the job."""
    short = _shortest(record)
    del short.outcomes[:]
    del short.spec.hosts[:]
    short.spec.environment.clear()
    short.spec.labels.clear()
    short.sentence = _cut(short.sentence, 1000)
    for name in ("name", "directory", "user", "python_environment", "project"):
        setattr(short.spec, name, getattr(short.spec, name)[:200])
    words = [word[:200] for word in short.spec.command[:20]]
    del short.spec.command[:]
    short.spec.command.extend(words)
    for line in short.spec.lines:
        del line.command[:]
        line.title, line.shown = line.title[:100], line.shown[:100]
    for share in short.shares:
        del share.gpus[:], share.interfaces[:]
    return short


def _shortest(record: jobs_pb2.JobRecord) -> jobs_pb2.JobRecord:
    short = jobs_pb2.JobRecord()
    short.CopyFrom(record)
    short.sentence = _cut(record.sentence, _MAX_SENTENCE)
    for one in short.hosts_aside:
        one.reason = ""
    for share in short.shares:
        del share.left[:]  # what ranks printed there is not found any more
    told = 0
    for outcome in short.outcomes:
        if not 0 < outcome.pid < 1 << 31:
            outcome.pid = 0
        if outcome.lost:
            outcome.lost = outcome.lost[:_MAX_CAUSE] if told < _TOLD_LOSSES else _UNTOLD
            told += 1
    return short


def _cut(sentence: str, limit: int) -> str:
    """Its first characters, and its code."""
    return sentence if len(sentence) <= limit else coded_like(sentence, without_code(sentence)[:limit])
