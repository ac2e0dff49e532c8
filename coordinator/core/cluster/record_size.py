"""How large the record of a job may be, so that every state of the job can be written to any store.

A record grows while the job runs: the hosts on which it runs, how each process ended, what people are told. So a job is
taken only if its description leaves room for the shortest form of all that, and a record that is longer than a store
takes is written in that form (`stored`). The coordinator that made it goes on with all of it in memory.
"""

from horovod.base.errors import ClusterCode, coded, coded_like, without_code
from horovod.protos.v1 import jobs_pb2

from .sizes import processes_of

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
    remedy = "Put what is long into a file."
    if largest == "environment":
        longest = max(spec.environment, key=lambda name: len(spec.environment[name]))
        remedy = f"Leave out what the job need not have, as in `env -u {longest[:100]} horovodrun ...`."
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
