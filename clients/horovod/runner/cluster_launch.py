"""`horovodrun --coordinator`: the job runs on agents that are registered there, and this launcher only follows it."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from horovod.coordinator.core.clustered import OVER
from horovod.coordinator.core.words import joined, ranks_in_words
from horovod.protos.v1 import jobs_pb2
from horovod.runner.cluster_client import Access, ClusterClient, FollowedJob, coordinators_of, exported
from horovod.runner.control import Control
from horovod.runner.hosts import HostSlots, fill
from horovod.runner.job import terminal_size
from horovod.runner.observed import traced
from horovod.worker.agent.output import Console, Writer

OnStart = Callable[[Any], None]
OnChange = Callable[[jobs_pb2.JobRecord], None]

_OUTPUT_GRACE_S = 1.0
_POLL_S = 0.05


def job_of(args: argparse.Namespace, environ: Mapping[str, str], hosts: Sequence[tuple[str, int]]) -> jobs_pb2.JobSpec:
    """What to submit for a command line."""
    spec = jobs_pb2.JobSpec(
        name=args.job_name or "",
        command=args.command,
        environment=exported(environ),
        directory=os.getcwd(),
        processes=args.num_proc,
        labels=dict(args.label),
        user=user_name(),
        attended=not args.detach,
    )
    spec.needs.gpus = args.gpus_per_process or 0
    spec.needs.cpus = args.cpus_per_process or 0.0
    spec.needs.memory_bytes = int((args.memory_gb_per_process or 0.0) * 2**30)
    for name, slots in hosts:
        spec.hosts.add(name=name, slots=slots)
    return spec


def user_name() -> str:
    """Who submits; a number where it has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def launch_on_agents(args: argparse.Namespace, environ: Mapping[str, str], hosts: Sequence[tuple[str, int]]) -> int:
    """Runs the job of a command line on registered agents; the exit code of the launcher."""
    access = Access.of(coordinators_of(args.coordinator, "--coordinator"), environ)
    count = args.num_proc or sum(slots for _, slots in hosts)
    if not count:
        raise ValueError("-np is missing: say how many processes to start, for example -np 2.")
    if hosts:
        fill([HostSlots(*host) for host in hosts], count)  # says when they are too few
    args.num_proc = count
    spec = job_of(args, {**environ, **terminal_size(environ)}, hosts)
    if args.detach:
        print(submit(access, spec).id, flush=True)
        return 0

    def run(console: Console, on_start: OnStart, changed: OnChange) -> jobs_pb2.JobRecord:
        with traced(count) as trace:
            spec.environment.update(trace)
            return asyncio.run(attended(access, spec, console, on_start, changed))

    return show(args, count, run)


def show(args: argparse.Namespace, size: int, run: Callable[[Console, OnStart, OnChange], jobs_pb2.JobRecord]) -> int:
    """Shows a job of `size` ranks to its end, which `run` waits for; the exit code of the launcher."""
    writer = Writer()
    directory = Path(args.output_filename) if args.output_filename else None
    console = Console(writer, directory=directory, size=size, timestamps=args.prefix_output_with_timestamp)
    told: list[str] = []

    def changed(record: jobs_pb2.JobRecord) -> None:
        news = [] if record.ended_at else [f"job {record.id}: {record.sentence}"] if record.sentence else []
        if args.verbose and record.started_at:
            news = [f"job {record.id} runs: {in_words(share)}" for share in record.shares]
        for line in news:
            if line not in told:
                told.append(line)
                console.note(f"horovodrun: {line}")

    with Control(console, writer) as control:
        try:
            record = run(console, control.attach, changed)
        finally:
            console.close(timeout_s=1)
    if control.code is not None:
        say(control.sentence)
        return control.code
    code, sentence = outcome_of(record)
    if sentence:
        say(sentence)
    return code


def in_words(share: jobs_pb2.Share) -> str:
    """`ranks 0 and 1 on h1, over eth0`."""
    words = f"{ranks_in_words(range(share.first_rank, share.first_rank + share.ranks))} on {share.agent}"
    if share.gpus:
        words += f", GPUs {', '.join(share.gpus)}"
    return f"{words}, over {joined(list(share.interfaces))}" if share.interfaces else words


def submit(access: Access, spec: jobs_pb2.JobSpec) -> jobs_pb2.JobRecord:
    """For --detach."""

    async def run() -> jobs_pb2.JobRecord:
        async with ClusterClient(access) as cluster:
            return await cluster.submit(spec)

    return asyncio.run(run())


async def attended(
    access: Access,
    work: jobs_pb2.JobSpec | jobs_pb2.Open,
    console: Console,
    on_start: OnStart,
    changed: OnChange = lambda record: None,
    prepare: Callable[[FollowedJob], None] = lambda job: None,
) -> jobs_pb2.JobRecord:
    """Submits a job, or follows one that is there, shows its output and returns its record when it is over.

    on_start: called in the event loop with what a signal handler may stop. prepare: called with the job before that.
    ClusterError, with a sentence, when no coordinator serves.
    """
    async with ClusterClient(access) as cluster:
        job = FollowedJob(cluster, console)
        job.changed = changed
        prepare(job)
        on_start(job)
        record = await (job.follow(work) if isinstance(work, jobs_pb2.Open) else job.run(work))
        await _last_lines(job, console)
        return record


async def _last_lines(job: FollowedJob, console: Console) -> None:
    """Signals must still be seen while a slow reader takes the last lines, so this waits in small steps."""
    loop = asyncio.get_running_loop()
    give_up_at: float | None = None
    while not console.close(timeout_s=0):
        if job.stopping and give_up_at is None:
            give_up_at = loop.time() + _OUTPUT_GRACE_S
        if give_up_at is not None and loop.time() > give_up_at:
            break
        await asyncio.sleep(_POLL_S)


def outcome_of(record: jobs_pb2.JobRecord) -> tuple[int, str]:
    """The exit code of a launcher for a job that is over, and what to say about it."""
    if record.state == jobs_pb2.JOB_STATE_SUCCEEDED:
        return 0, ""
    if record.state not in OVER:
        return 1, f"The coordinator ended the stream before job {record.id} was over: see `horovodrun ps`."
    return record.exit_code or 1, record.sentence


def say(sentence: str) -> None:
    print(f"horovodrun: {sentence}", file=sys.stderr, flush=True)
