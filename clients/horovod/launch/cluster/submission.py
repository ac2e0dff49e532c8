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

from horovod.base.errors import LaunchCode, coded
from horovod.base.words import for_people, joined, ranks_in_words
from horovod.launch.cluster.client import Access, ClusterClient, FollowedJob, coordinators_of, exported
from horovod.launch.console.control import Control, without_loop
from horovod.launch.console.report import ASK_S, last_lines, outcome_of, story_told
from horovod.launch.console.streams import PythonStreams, terminal_size
from horovod.launch.elastic.request import elastic_variables, write_policy
from horovod.launch.own_coordinator import traced
from horovod.protos.v1 import jobs_pb2
from horovod.protos.v1.story_pb2 import StoryEntry
from horovod.rendezvous.hosts import HostSlots, fill
from horovod.worker.agent.output import Console

OnStart = Callable[[Any], None]
OnChange = Callable[[jobs_pb2.JobRecord], None]


def job_of(args: argparse.Namespace, environ: Mapping[str, str], hosts: Sequence[tuple[str, int]]) -> jobs_pb2.JobSpec:
    """What to submit for a command line."""
    spec = jobs_pb2.JobSpec(
        name=args.job_name or "",
        command=args.command,
        environment=exported({**environ, **elastic_variables(args.replacement)}),
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
    write_policy(spec, args.replacement, environ)
    return spec


def user_name() -> str:
    """The name of the user who submits, or the user's number where there is no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def launch_on_agents(args: argparse.Namespace, environ: Mapping[str, str], hosts: Sequence[tuple[str, int]]) -> int:
    """Runs the job of a command line on registered agents; the exit code of the launcher."""
    access = Access.of(coordinators_of(args.coordinator, "--coordinator"), environ)
    count = args.num_proc or sum(slots for _, slots in hosts)
    if not count:
        sentence = "-np is missing: say how many processes to start, for example -np 2."
        raise ValueError(coded(LaunchCode.WRONG_COMMAND_LINE, sentence))
    if hosts:
        fill([HostSlots(*host) for host in hosts], count)  # raises when the hosts have too few slots
    args.num_proc = count
    spec = job_of(args, {**environ, **terminal_size(environ)}, hosts)
    if args.detach:
        print(for_people(submit(access, spec).id), flush=True)
        return 0

    def run(console: Console, on_start: OnStart, changed: OnChange) -> jobs_pb2.JobRecord:
        with traced(count) as trace:
            spec.environment.update(trace)
            note = (lambda line: console.note(f"horovodrun: {line}")) if args.verbose else None

            def prepare(job: FollowedJob) -> None:
                job.ends_if_suspended = True

            return asyncio.run(attended(access, spec, console, on_start, changed, prepare, note))

    return show(args, args.replacement.greatest(count) if args.replacement else count, run)


def show(args: argparse.Namespace, size: int, run: Callable[[Console, OnStart, OnChange], jobs_pb2.JobRecord]) -> int:
    """Shows a job of `size` ranks to its end, which `run` waits for; the exit code of the launcher."""
    streams = PythonStreams()
    directory = Path(args.output_filename) if args.output_filename else None
    console = Console(
        streams.writer,
        descriptors=streams.descriptors,
        directory=directory,
        size=size,
        timestamps=args.prefix_output_with_timestamp,
    )
    told: set[tuple[int, str]] = set()  # with the generation of the job's target: a sentence may be news once more

    def changed(record: jobs_pb2.JobRecord) -> None:
        news = [] if record.ended_at else [f"job {record.id}: {record.sentence}"] if record.sentence else []
        if args.verbose and record.started_at:
            news += [f"job {record.id} runs: {in_words(share)}" for share in record.shares if share.slots]
        for line in news:
            if (record.generation, line) not in told:
                told.add((record.generation, line))
                console.note(f"horovodrun: {line}")

    with Control(console, streams) as control:
        try:
            record = without_loop(lambda: run(console, control.attach, changed))
        finally:
            console.close(timeout_s=1)
    if control.code is not None:
        say(control.sentence)
        return control.code
    code, sentence = outcome_of(record, console.last_error)
    if sentence:
        say(sentence)
    return code


def in_words(share: jobs_pb2.Share) -> str:
    """`ranks 0 and 1 on h1, over eth0`."""
    words = f"{ranks_in_words(share.slots)} on {share.agent}"
    if share.gpus:
        words += f", GPUs {', '.join(share.gpus)}"
    return f"{words}, over {joined(list(share.interfaces))}" if share.interfaces else words


def submit(access: Access, spec: jobs_pb2.JobSpec) -> jobs_pb2.JobRecord:
    """Submits the job and returns, for --detach."""

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
    note: Callable[[str], None] | None = None,
    refused_s: float | None = None,
) -> jobs_pb2.JobRecord:
    """Submits a job, or follows one that is there, shows its output and returns its record when it is over.

    on_start: called in the event loop with what a signal handler may stop. prepare: called with the job before that.
    note: shows a line of the job's story; None: it is not told. refused_s: as ClusterClient has it.

    ClusterError, with a sentence, when no coordinator serves.
    """
    # The story is asked for by a client of its own, which gives up at once: a question in vain must not send the other
    # one to another coordinator.
    async with (
        ClusterClient(access, refused_s=refused_s) as cluster,
        ClusterClient(access, patience_s=0) as asking,
    ):
        job = FollowedJob(cluster, console)
        job.changed = changed

        async def story() -> Sequence[StoryEntry]:
            return await asking.story(job.record.id) if job.record.id else ()

        prepare(job)
        on_start(job)
        async with story_told(note, story, ASK_S):
            record = await (job.follow(work) if isinstance(work, jobs_pb2.Open) else job.run(work))
        await last_lines(console, lambda: job.stopping)
        return record


def say(sentence: str) -> None:
    print(for_people(f"horovodrun: {sentence}"), file=sys.stderr, flush=True)
