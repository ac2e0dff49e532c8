"""Jobs on this machine: every rank is a child of the launcher, whose own coordinator decides."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from horovod.base.errors import LaunchCode, code_of, coded
from horovod.base.settings import resolve
from horovod.launch.asked import FAILED, Asked, RefusedError, in_words, say
from horovod.launch.console import standard_input
from horovod.launch.console.control import Control, without_loop
from horovod.launch.console.streams import PythonStreams
from horovod.worker.agent.gate import NOT_EXECUTABLE, NOT_FOUND
from horovod.worker.agent.guardian import Guardian
from horovod.worker.agent.output import Console


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
