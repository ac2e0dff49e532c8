"""`horovodrun ps | logs | stop | wait`: jobs on registered agents, after they were submitted."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from horovod.base.errors import ClusterCode, coded
from horovod.base.settings import ROWS
from horovod.base.words import printable
from horovod.coordinator.core.cluster.job_record import processes_of
from horovod.launch.cluster.job_file.submit import add_options, words_of
from horovod.launch.cluster.submission import say
from horovod.protos.v1 import jobs_pb2, story_pb2

_STATES = {
    jobs_pb2.JOB_STATE_QUEUED: "queued",
    jobs_pb2.JOB_STATE_CONNECTING: "connecting",
    jobs_pb2.JOB_STATE_RUNNING: "running",
    jobs_pb2.JOB_STATE_ENDING: "ending",
    jobs_pb2.JOB_STATE_SUCCEEDED: "succeeded",
    jobs_pb2.JOB_STATE_FAILED: "failed",
    jobs_pb2.JOB_STATE_STOPPED: "stopped",
}
_EVENTS = {
    story_pb2.STORY_EVENT_FORMED: "formed",
    story_pb2.STORY_EVENT_LOST: "lost",
    story_pb2.STORY_EVENT_LEFT: "left",
    story_pb2.STORY_EVENT_WAITS: "waits",
    story_pb2.STORY_EVENT_TAKEN_OVER: "taken over",
    story_pb2.STORY_EVENT_OVER: "over",
}
_SHOWN_WORDS = 40  # characters of a command in the table


def add_job_commands(commands: Any, parser_class: type[argparse.ArgumentParser]) -> None:
    """Adds the sub-commands to those of `horovodrun`; each sets `code`, which runs it and returns the exit code."""
    shared = parser_class(add_help=False)
    shared.add_argument(
        "--coordinator", metavar="A:29400,B:29400", help="addresses of the coordinators (default: HOROVOD_COORDINATOR)"
    )
    shared.add_argument("--verbose", action="store_true", help=argparse.SUPPRESS)

    def add(name: str, text: str, code: Callable[[argparse.Namespace], int], job: bool = True) -> Any:
        command = commands.add_parser(name, prog=f"horovodrun {name}", help=text, description=text, parents=[shared])
        if job:
            command.add_argument("job", metavar="JOB", help="id of the job, as `horovodrun ps` shows it")
        command.set_defaults(code=code)
        return command

    text = "Run a job file on registered agents. Its workers execute the lines of the file one after the other."
    submit = add("submit", text, _submit, job=False)
    add_options(submit)
    ps = add("ps", "Show jobs (the latest first) and hosts, or the history of one job.", _ps, job=False)
    text = "show only this job, with its history: worlds, ranks that left and why, processes that it waits for"
    ps.add_argument("job", metavar="JOB", nargs="?", default="", help=text)
    ps.add_argument("--output-format", choices=("table", "json"), default="table")
    ps.add_argument(
        "--all",
        action="store_true",
        help="show all jobs in the store, not only running jobs and the latest 50 that ended",
    )
    logs = add("logs", "Show the output of a job's ranks.", _logs)
    logs.add_argument("-f", "--follow", action="store_true", help="continue until the job ends")
    logs.add_argument(
        "--rank", type=int, action="append", default=[], metavar="N", help="show only this rank; may be repeated"
    )
    logs.add_argument(
        "-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true", help="put the time before each line"
    )
    stop = add("stop", "End a job: send SIGTERM to every rank, and SIGKILL 10 seconds later.", _stop)
    stop.add_argument("--now", action="store_true", help="send SIGKILL at once")
    wait = add("wait", "Wait until a job ends, and exit with its exit code.", _wait)
    wait.add_argument("--timeout", type=float, metavar="S", help="stop waiting after S seconds, and exit with 124")


def _access(args: argparse.Namespace) -> Any:
    from horovod.launch.cluster.client import Access, coordinators_of

    given = args.coordinator or ROWS["coordinator"].text(os.environ)
    if not given.strip():
        sentence = "Which coordinator? Name it with --coordinator host:port, or in HOROVOD_COORDINATOR."
        raise ValueError(coded(ClusterCode.NO_COORDINATOR_NAMED, sentence))
    return Access.of(coordinators_of(given, "--coordinator" if args.coordinator else "HOROVOD_COORDINATOR"), os.environ)


def _ask(args: argparse.Namespace, question: Callable[[Any], Any]) -> Any:
    from horovod.launch.cluster.client import REFUSED_S, ClusterClient

    async def run() -> Any:
        async with ClusterClient(_access(args), patience_s=10, refused_s=REFUSED_S) as cluster:
            return await question(cluster)

    return asyncio.run(run())


def _submit(args: argparse.Namespace) -> int:
    from horovod.launch.cluster.job_file.submit import submit

    return submit(args, _access)


def _ps(args: argparse.Namespace) -> int:
    most = 1 << 20 if args.all else 0
    listing: jobs_pb2.Listing = _ask(args, lambda cluster: cluster.listing(most, args.job))
    if args.output_format == "json":
        print(json.dumps(as_json(listing), indent=2))
    elif args.job:
        print(as_story(listing, time.time()), end="")
    else:
        print(as_table(listing, time.time()), end="")
    return 0


def as_json(listing: jobs_pb2.Listing) -> dict[str, Any]:
    """The job as JSON for programs; its names stay the same from version to version."""
    jobs = []
    for record in listing.jobs:
        jobs.append(
            {
                "id": record.id,
                "state": _STATES[record.state],
                "reason": record.sentence,
                "user": record.spec.user,
                "project": record.spec.project or None,
                "command": list(words_of(record)),
                "line": record.line + 1 if record.spec.lines else None,
                "lines": len(record.spec.lines) or None,
                "processes": processes_of(record),
                "hosts": [
                    {
                        "host": share.agent,
                        "first_rank": min(share.slots, default=0),
                        "ranks": len(share.slots),
                        "gpus": list(share.gpus),
                    }
                    for share in record.shares
                    if share.slots
                ],
                "hosts_aside": [
                    {"host": one.agent, "reason": one.reason, "until": one.until or None} for one in record.hosts_aside
                ],
                "submitted_at": record.submitted_at,
                "started_at": record.started_at or None,
                "ended_at": record.ended_at or None,
                "exit_code": record.exit_code if record.ended_at else None,
            }
        )
    agents = [
        {
            "host": agent.name,
            "state": agent.state,
            "slots": agent.slots,
            "free_slots": agent.free_slots,
            "gpus": agent.gpus,
            "labels": dict(agent.labels),
            "version": agent.version,
        }
        for agent in listing.agents
    ]
    return {"jobs": jobs, "hosts": agents, "worlds": [_world_as_json(one) for one in listing.worlds]}


def _world_as_json(world: story_pb2.JobStory) -> dict[str, Any]:
    story = [
        {
            "at": entry.at,
            "epoch": entry.epoch,
            "event": _EVENTS.get(entry.event, "unknown"),
            "rank": entry.rank if entry.HasField("rank") else None,
            "host": entry.host or None,
            "sentence": entry.sentence,
        }
        for entry in world.entries
    ]
    return {"job": world.job, "epoch": world.epoch, "size": world.size, "members": world.members, "story": story}


def as_table(listing: jobs_pb2.Listing, now_s: float) -> str:
    """Tables for people: submitted jobs, worlds that were started by hand, and hosts."""
    lines = _jobs_as_table(listing.jobs, now_s)
    if not listing.jobs and not listing.worlds:
        lines = ["No job is known here."]
    if listing.worlds:
        worlds = [("JOB", "WORLD", "MEMBERS")]
        for one in listing.worlds:
            is_over = bool(one.entries) and one.entries[-1].event == story_pb2.STORY_EVENT_OVER
            members = f"{one.members} of {one.size}" if one.members else "over" if is_over else "waits"
            worlds.append((one.job, str(one.epoch), members))
        lines += [*([""] if lines else []), *_columns(worlds)]
    agents = [("HOST", "STATE", "SLOTS", "FREE", "GPUS")]
    for agent in listing.agents:
        agents.append((agent.name, agent.state, str(agent.slots), str(agent.free_slots), str(agent.gpus)))
    lines += ["", *_columns(agents)] if listing.agents else ["", "No host is registered here."]
    return "\n".join(lines) + "\n"


def as_story(listing: jobs_pb2.Listing, now_s: float) -> str:
    """One job, and what has happened to its worlds, for people."""
    lines = _jobs_as_table(listing.jobs, now_s)
    for world in listing.worlds:
        now = f"world {world.epoch}, {world.members} of {world.size} members" if world.members else "no world runs"
        lines += [*([""] if lines else []), f"{printable(world.job)}: {now}."]
        for entry in world.entries:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.at))
            lines.append(f"  {at}  {printable(entry.sentence)}")
    return "\n".join(lines) + "\n"


def _jobs_as_table(jobs: Sequence[jobs_pb2.JobRecord], now_s: float) -> list[str]:
    """With the reasons of those that wait or have failed; nothing where there is no job."""
    rows = [("JOB", "STATE", "RANKS", "HOSTS", "USER", "AGE", "COMMAND")]
    for record in jobs:
        command = " ".join(words_of(record))
        shown = command if len(command) <= _SHOWN_WORDS else f"{command[: _SHOWN_WORDS - 3]}..."
        names = [share.agent for share in record.shares if share.slots]
        hosts = ",".join(names[:3]) + (",..." if len(names) > 3 else "")
        state = _STATES[record.state] + (f" ({record.exit_code})" if record.state == jobs_pb2.JOB_STATE_FAILED else "")
        age = _age((record.ended_at or now_s) - record.submitted_at)
        rows.append((record.id, state, str(processes_of(record)), hosts or "-", record.spec.user, age, shown))
    if not jobs:
        return []
    reasons = [
        printable(f"{record.id}: {record.sentence}")
        for record in jobs
        if record.sentence and record.state not in (jobs_pb2.JOB_STATE_SUCCEEDED, jobs_pb2.JOB_STATE_STOPPED)
    ]
    return [*_columns(rows), *(["", *reasons] if reasons else [])]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    rows = [[printable(text) for text in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _age(seconds: float) -> str:
    seconds = max(0, int(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def _logs(args: argparse.Namespace) -> int:
    from horovod.launch.cluster.client import REFUSED_S
    from horovod.launch.cluster.submission import attended
    from horovod.launch.console.streams import PythonStreams
    from horovod.worker.agent.output import Console

    request = jobs_pb2.Open(job=args.job, output=True, ranks=args.rank, until_now=not args.follow)
    streams = PythonStreams()
    console = Console(streams.writer, descriptors=streams.descriptors, timestamps=args.prefix_output_with_timestamp)

    async def show() -> None:
        """Shows a job until Ctrl-C or until its reader goes away; neither ends the job."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        loop.add_signal_handler(signal.SIGINT, task.cancel)

        def failed(descriptor: int, error: OSError) -> None:
            loop.call_soon_threadsafe(task.cancel)

        streams.writer.failed = failed
        await attended(_access(args), request, console, lambda job: None, refused_s=REFUSED_S)

    try:
        asyncio.run(show())
    except asyncio.CancelledError:
        return 128 + signal.SIGINT
    finally:
        console.close(timeout_s=1)
    return 0


def _stop(args: argparse.Namespace) -> int:
    signum = signal.SIGKILL if args.now else signal.SIGTERM
    record: jobs_pb2.JobRecord = _ask(args, lambda cluster: cluster.signal(args.job, signum))
    if record.ended_at:
        say(f"job {record.id} is over: {_STATES[record.state]}.")
    return 0


def _wait(args: argparse.Namespace) -> int:
    from horovod.launch.console.report import outcome_of

    latest = [jobs_pb2.JobRecord()]

    async def none(output: jobs_pb2.Output) -> None:
        pass

    async def wait(cluster: Any) -> None:
        request = jobs_pb2.Open(job=args.job)
        await asyncio.wait_for(cluster.follow(request, latest.append, none), args.timeout)

    try:
        _ask(args, wait)
    except asyncio.TimeoutError:
        say(coded(ClusterCode.JOB_NOT_OVER, f"job {args.job} is not over after {args.timeout:g} s."))
        return 124
    code, sentence = outcome_of(latest[-1])
    if sentence:
        say(sentence)
    return code
