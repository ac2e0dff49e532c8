"""Jobs on this machine: every rank is a child of the launcher, whose own coordinator decides."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod.base.errors import LaunchCode, code_of, coded
from horovod.base.settings import resolve
from horovod.launch.asked import FAILED, Asked, AskedFunction, InThread, RefusedError, Stoppable, in_words, say
from horovod.launch.console import standard_input
from horovod.launch.console.control import Control, without_loop
from horovod.launch.console.streams import PythonStreams
from horovod.worker.agent.gate import NOT_EXECUTABLE, NOT_FOUND
from horovod.worker.agent.guardian import Guardian
from horovod.worker.agent.output import Console

if TYPE_CHECKING:
    from horovod.launch.task import Exchange
    from horovod.protos.v1.jobs_pb2 import JobRecord


def takes(asked: Asked) -> bool:
    """It is the last one, for what no other takes."""
    return True


def launch(asked: Asked) -> int:
    """Runs the job; the exit code of the launcher."""
    names = asked.hosts
    _check_command(asked.args.command[0], asked.environ)
    with standard_input.of_ranks(asked.args.command, len(names), say) as stdin:
        return _run(asked, stdin)


def _run(asked: Asked, stdin: Sequence[int | None]) -> int:
    args, environ, names = asked.args, asked.environ, asked.hosts
    with Guardian() as guardian:  # before anything that makes threads, so that nothing can come between
        # gRPC and the coordinator are loaded after the checks: a mistake is answered at once.
        from horovod.launch.console.report import Progress, outcome_of
        from horovod.launch.console.streams import terminal_size
        from horovod.launch.local.job import LocalJob, run_job, share_of_cores, threads_in_words

        threads = share_of_cores(environ, len(names))
        own = {**environ, **threads, **terminal_size(environ)}
        job = LocalJob(args.command, names, own, stdin=stdin, processes=args.num_proc)
        streams = PythonStreams()
        directory = Path(args.output_filename) if args.output_filename else None
        console = Console(
            streams.writer,
            descriptors=streams.descriptors,
            directory=directory,
            size=len(names),
            timestamps=args.prefix_output_with_timestamp,
            job=resolve(environ).job if resolve(environ).log_format == "json" else None,
            asking=0 if stdin[0] is not None and os.isatty(stdin[0]) else None,
        )
        if args.verbose:
            console.note(f"horovodrun: starting {len(names)} processes: {' '.join(args.command)}")
            console.note(f"horovodrun: {threads_in_words(threads)}")
        with Control(console, streams) as control:
            try:
                progress = Progress(console, job.host_names, verbose=args.verbose)
                record = without_loop(
                    lambda: run_job(job, console, guardian, control.attach, progress, args.replacement, args.verbose)
                )
            except OSError as error:
                sentence = f"The job could not be started: {in_words(error)}."
                sentence = coded(code_of(error) or LaunchCode.PROCESS_NOT_STARTED, sentence)
                raise RefusedError(sentence, FAILED) from error
            finally:
                console.close(timeout_s=1)
    if control.code is not None:
        say(control.sentence, args)
        return control.code
    code, sentence = outcome_of(record, console.last_error)
    if sentence:
        say(sentence, args)
    return code


def _check_command(program: str, environ: Mapping[str, str]) -> None:
    """A command that cannot be started is better said once than by every rank."""
    if shutil.which(program, path=environ.get("PATH")):
        return
    path = Path(program)
    if os.sep not in program:
        hint = f"; to run the file here write ./{program} or python {program}" if path.exists() else ""
        reason, code = f"was not found on PATH{hint}", NOT_FOUND
    elif not path.exists():
        reason, code = "does not exist", NOT_FOUND
    else:
        reason = "is a folder" if path.is_dir() else "is not executable (chmod +x, or put python before it)"
        code = NOT_EXECUTABLE
    raise RefusedError(coded(LaunchCode.COMMAND_UNUSABLE, f"The command {program!r} {reason}."), code)


def takes_function(asked: AskedFunction) -> bool:
    """As `takes`."""
    return True


def run_function(asked: AskedFunction, in_thread: InThread) -> list[Any]:
    """Runs the job; the results by rank. Function and results travel in files without a name (task.py): no port is
    opened for them.
    """
    from horovod.launch.task import Exchange

    # Guardian first: the job makes threads and gRPC channels.
    with Guardian() as guardian, Exchange(len(asked.names), *asked.call) as exchange:
        from horovod.launch.console.report import Progress
        from horovod.launch.local.job import LocalJob, run_job, share_of_cores

        environ = {**asked.environ, **share_of_cores(asked.environ, len(asked.names))}
        descriptors = [exchange.descriptors(rank) for rank in range(len(asked.names))]
        job = LocalJob(exchange.command(asked.python or sys.executable), asked.names, environ, descriptors)
        records: list[JobRecord] = []

        def run(console: Console, on_start: Callable[[Stoppable], None]) -> None:
            progress = Progress(console, job.host_names, verbose=asked.verbose)
            records.append(run_job(job, console, guardian, on_start, progress))

        in_thread(run)
        return _results(exchange, records[0], job.host_names)


def _results(exchange: Exchange, record: JobRecord, hosts: Sequence[str]) -> list[Any]:
    from horovod.coordinator.core.cluster.job_record import RankExit
    from horovod.coordinator.core.ending import explain, first_failure
    from horovod.launch import task

    left: dict[int, task.Result] = {}
    for rank in range(len(hosts)):
        if (result := exchange.result(rank)) is not None:
            left[rank] = result
    exits = [RankExit.of(outcome) for outcome in record.outcomes]
    first = first_failure(exits)
    if first is not None:
        # A process takes a while to end after its exception, and a peer that noticed may be faster: the clock decides.
        raised = [rank for rank, result in left.items() if result.error is not None]
        if first.rank not in raised:
            raise RuntimeError(coded(LaunchCode.RANK_FAILED, explain(exits, hosts) or ""))
        rank = min(raised, key=lambda rank: left[rank].at_s)
        raise RuntimeError(task.raised(rank, hosts[rank], left[rank]))
    if silent := [rank for rank in range(len(hosts)) if rank not in left]:
        raise RuntimeError(task.no_result(silent[0], hosts[silent[0]]))
    return [task.value_of(rank, left[rank]) for rank in range(len(hosts))]
