"""`horovodrun submit job.yaml`: reads a job file, ships its code and follows the job."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from horovod.base.errors import ClusterCode, code_of, coded
from horovod.base.words import capitalized, for_people, plural
from horovod.coordinator.core.cluster import lines
from horovod.launch.cluster.client import REFUSED_S, Access, ClusterClient, ClusterError, FollowedJob
from horovod.launch.cluster.job_file.archive import Archive, pack
from horovod.launch.cluster.job_file.job_file import JobFile
from horovod.launch.cluster.submission import OnChange, OnStart, attended, in_words, show, user_name
from horovod.protos.v1 import jobs_pb2
from horovod.worker.agent.output import Console

_UPLOADS = 3  # attempts: uploads of others may displace the code between its upload and the job


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE", help="the job file: docs/jobs.md")
    command.add_argument(
        "--detach",
        action="store_true",
        help="print the job's id and return at once; `horovodrun logs -f ID` shows the output",
    )
    command.add_argument("--dry-run", action="store_true", help="check the file and show where the job would run now")
    command.add_argument(
        "-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true", help="put the time before each line"
    )
    command.add_argument("--output-filename", metavar="DIR", help="also write DIR/rank.N/stdout and stderr")


def submit(args: argparse.Namespace, access: Callable[[argparse.Namespace], Access]) -> int:
    """The exit code. ValueError with sentences for a file that makes no sense."""
    file = read(args.file)
    spec = file.spec(os.environ, user_name(), attended=not args.detach)
    archive = pack(file.code, f"{file.path}, line {file.line_of('code')}") if file.code else None
    if archive is not None:
        spec.code.sha256, spec.code.size = archive.sha256, archive.size
    if args.dry_run:
        print(for_people(asyncio.run(_placement(access(args), spec, archive))))
        return 0
    if args.detach:
        print(for_people(asyncio.run(_submitted(access(args), spec, archive)).id), flush=True)
        return 0

    def run(console: Console, on_start: OnStart, changed: OnChange) -> jobs_pb2.JobRecord:
        def prepare(job: FollowedJob) -> None:
            job.submit = lambda cluster, spec: _with_code(cluster, spec, archive)

        telling = _telling_lines(console, changed)
        return asyncio.run(attended(access(args), spec, console, on_start, telling, prepare, refused_s=REFUSED_S))

    size = file.replacement.greatest(spec.processes) if file.replacement else spec.processes
    return show(args, size, run)


def read(path: str) -> JobFile:
    """ValueError with sentences for a file that can't be read, or makes no sense."""
    try:
        return JobFile.read(Path(path))
    except OSError as error:
        sentence = f"The job file {path!r} can't be read: {error.strerror}."
        raise ValueError(coded(ClusterCode.WRONG_JOB_FILE, sentence)) from None


async def _submitted(access: Access, spec: jobs_pb2.JobSpec, archive: Archive | None) -> jobs_pb2.JobRecord:
    async with ClusterClient(access, refused_s=REFUSED_S) as cluster:
        return await _with_code(cluster, spec, archive)


async def _with_code(cluster: ClusterClient, spec: jobs_pb2.JobSpec, archive: Archive | None) -> jobs_pb2.JobRecord:
    for left in reversed(range(_UPLOADS)):
        if archive is not None:
            await upload(cluster, archive)
        try:
            return await cluster.submit(spec)
        except RuntimeError as error:
            if archive is None or not left or code_of(error) is not ClusterCode.CODE_NOT_HERE:
                raise
    raise AssertionError


async def upload(cluster: ClusterClient, archive: Archive) -> None:
    """Sends what of the archive the coordinator does not have."""
    code = jobs_pb2.Code(sha256=archive.sha256, size=archive.size)
    found = await cluster.find_code(code)
    for _ in range(_UPLOADS * (len(found.missing) + 1)):  # another coordinator may ask for all of it again
        if found.complete:
            return
        index = found.missing[0]
        part = archive.content[index * found.chunk_bytes : (index + 1) * found.chunk_bytes]
        found = await cluster.put_code(jobs_pb2.CodeChunk(code=code, index=index, data=part))
    sentence = "The code does not arrive whole: coordinators have changed several times. Submit it again."
    raise ClusterError(coded(ClusterCode.CODE_NOT_HERE, sentence))


async def _placement(access: Access, spec: jobs_pb2.JobSpec, archive: Archive | None) -> str:
    async with ClusterClient(access, patience_s=10, refused_s=REFUSED_S) as cluster:
        record = await cluster.place(spec)
    workers, each = spec.processes // spec.processes_per_worker, spec.processes_per_worker
    how_many = plural(workers, "worker")
    if spec.policy.fewest:
        how_many = f"{workers} to {spec.policy.most} workers" if spec.policy.most else f"{how_many} or more"
    told = [f"{how_many} of {plural(each, 'process')} each; the job file is in order."]
    if archive is not None:
        told.append(
            f"Code: {plural(archive.files, 'file')}, {archive.size:,} bytes when packed ({archive.sha256[:12]})."
        )
    for number, line in enumerate(spec.lines, 1):
        times = spec.processes if line.distributed else workers
        told.append(
            f"{number}. {line.shown}  ({plural(times, 'process')}{', distributed' if line.distributed else ''})"
        )
    if record.sentence:
        return "\n".join([*told, record.sentence])
    for share in record.shares:
        those = [slot // each for slot in share.slots[::each]]
        told.append(f"{capitalized(lines.workers_in_words(those))}: {in_words(share)}")
    return "\n".join(told)


def _telling_lines(console: Console, changed: OnChange) -> OnChange:
    """Says which line has begun."""
    told: list[str] = []

    def on_change(record: jobs_pb2.JobRecord) -> None:
        if record.state == jobs_pb2.JOB_STATE_RUNNING and (line := lines.in_words(record)) and line not in told:
            told.append(line)
            console.note(f"horovodrun: job {record.id}: {line}")
        changed(record)

    return on_change


def words_of(record: jobs_pb2.JobRecord) -> Sequence[str]:
    """What `horovodrun ps` shows as the command: of a run list the line that runs, or ran last."""
    spec: Any = record.spec
    return [spec.lines[record.line].shown] if spec.lines else spec.command
