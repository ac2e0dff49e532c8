"""The command `horovodrun`: reads the command line, runs the job, ends with the exit code that the job deserves."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from horovod.base.errors import EngineCode, LaunchCode, code_of, coded, without_code
from horovod.base.settings import ROWS, resolve
from horovod.base.standard_streams import open_missing_streams
from horovod.base.telemetry.logs import line_of
from horovod.base.words import for_people, is_out_of_descriptors, joined, plural, reason_of
from horovod.launch import commands
from horovod.launch.command_line import flags
from horovod.launch.command_line.config_file import read_config
from horovod.launch.command_line.job_flags import misplaced, unused_coordinator
from horovod.launch.console import standard_input
from horovod.launch.console.control import Control, without_loop
from horovod.launch.console.python_streams import PythonStreams
from horovod.launch.elastic.request import ElasticRequest
from horovod.rendezvous import lsf, task_of
from horovod.rendezvous.hosts import HostSlots, fill, parse_hostfile, parse_hosts, remote
from horovod.worker.agent.gate import NOT_EXECUTABLE, NOT_FOUND
from horovod.worker.agent.guardian import Guardian
from horovod.worker.agent.output import Console

_USAGE = 2
_FAILED = 1
_INTERRUPTED = 128 + signal.SIGINT

# Where the parsed arguments have the fields of an ElasticRequest, and how a user calls them.
_ELASTIC_DESTS = {
    "min_num_proc": "min_num_proc",
    "max_num_proc": "max_num_proc",
    "slots": "slots_per_host",
    "reset_limit": "reset_limit",
    "cooldown_range": "blacklist_cooldown_range",
    "host_discovery_script": "host_discovery_script",
    "spares": "spares",
}
_ELASTIC_FLAGS = {
    "num_proc": "-np",
    "min_num_proc": "--min-np",
    "max_num_proc": "--max-np",
    "slots": "--slots-per-host",
    "reset_limit": "--reset-limit",
    "cooldown_range": "--blacklist-cooldown-range",
    "host_discovery_script": "--host-discovery-script",
    "spares": "--spares",
}


class RefusedError(Exception):
    """The job was not started. The text is the sentence for the user."""

    def __init__(self, sentence: str, code: int = _USAGE) -> None:
        super().__init__(sentence)
        self.code = code


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked for form; `command` holds the program and its arguments."""
    return flags.parse_args(sys.argv[1:] if argv is None else argv)


def run_commandline(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command. Returns when all went well, else exits through SystemExit."""
    open_missing_streams()
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in commands.NAMES:
        sys.exit(commands.run(argv))
    verbose = False
    args: argparse.Namespace | None = None
    try:
        args = _parse_and_warn(argv)
        verbose = args.verbose
        code = _show(args) if args.check_build or args.completion else _launch(args)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except Exception as error:
        if verbose:
            traceback.print_exc()
        # RefusedError, ValueError and OSError carry a sentence for users; the type helps with others only.
        known = isinstance(error, RefusedError | ValueError | OSError | RuntimeError)
        text = f"{_in_words(error)}." if isinstance(error, OSError) else str(error)
        if not known:
            text = f"{type(error).__name__}: {without_code(error)} (--verbose shows where)."
        if not known or isinstance(error, OSError):
            text = coded(code_of(error) or EngineCode.INTERNAL, text)
        _say(text, args)
        code = error.code if isinstance(error, RefusedError) else _USAGE if isinstance(error, ValueError) else _FAILED
    if code != 0:
        sys.exit(code)


def _parse_and_warn(argv: Sequence[str] | None) -> argparse.Namespace:
    """Deprecated spellings are named in a line each, as all that the launcher says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeprecationWarning)
        args = parse_args(argv)
    for warning in caught:
        _say(str(warning.message))
    return args


def _in_words(error: OSError) -> str:
    """The error without its code and full stop. Errors of our own hold a sentence, those of system calls a number."""
    if error.strerror and error.strerror != os.strerror(error.errno or 0):
        return without_code(error.strerror).rstrip(".")
    return reason_of(error) if is_out_of_descriptors(error) else without_code(error).rstrip(".")


def _show(args: argparse.Namespace) -> int:
    """Answers options for which no job is needed, such as --check-build."""
    if args.completion:
        from horovod.launch.command_line.completion import script

        print(script(args.completion, flags.make_parser(), commands.parsers()), end="")
    else:
        from horovod.launch.command_line.check_build import check_build

        print(check_build(), end="")
    return 0


def _launch(args: argparse.Namespace) -> int:
    environ = _environment(args)
    if args.coordinator is not None:
        if args.host_discovery_script is not None:
            sentence = (
                "--host-discovery-script and --coordinator exclude each other: a job on registered agents grows onto "
                "agents that register later, and --host-discovery-script has this launcher start agents."
            )
            raise RefusedError(coded(LaunchCode.CONFLICTING_OPTIONS, sentence))
        from horovod.launch.cluster.launch import launch_on_agents

        _check_stdin_elsewhere(args.command)
        named = _named_hosts(args)
        hosts = [(host.name, host.slots) for host in named or ()]
        _check_elastic(args, args.num_proc or sum(slots for _, slots in hosts), len(named) if named else None)
        return launch_on_agents(args, environ, hosts)
    if alone := misplaced(args):
        raise RefusedError(alone)
    if unused := unused_coordinator(os.environ):
        _say(unused, args)
    if args.host_discovery_script is not None:
        return _launch_on_found_hosts(args, environ)
    names = _hosts(args)
    if remote(names):
        from horovod.launch.ssh.launch import launch_on_hosts

        _check_stdin_elsewhere(args.command)
        used = [HostSlots(name, names.count(name)) for name in dict.fromkeys(names)]
        return launch_on_hosts(args, environ, used, sys.executable)
    _check_command(args.command[0], environ)
    with standard_input.of_ranks(args.command, len(names), _say) as stdin:
        return _launch_here(args, environ, names, stdin)


def _launch_on_found_hosts(args: argparse.Namespace, environ: dict[str, str]) -> int:
    if args.num_proc is None:  # not even LSF says it then
        sentence = "-np is missing: say how many processes to start with, for example -np 2."
        raise ValueError(coded(LaunchCode.WRONG_COMMAND_LINE, sentence))
    _check_elastic(args, args.num_proc, None)
    _check_stdin_elsewhere(args.command)
    from horovod.launch.ssh.launch import launch_on_hosts

    return launch_on_hosts(args, environ, (), sys.executable)


def _launch_here(
    args: argparse.Namespace, environ: dict[str, str], names: Sequence[str], stdin: Sequence[int | None]
) -> int:
    with Guardian() as guardian:  # before anything that makes threads, so that nothing can come between
        # gRPC and the coordinator are loaded after the checks: a mistake is answered at once.
        from horovod.launch.console.progress import Progress
        from horovod.launch.console.report import outcome_of
        from horovod.launch.console.terminal import terminal_size
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
                sentence = f"The job could not be started: {_in_words(error)}."
                sentence = coded(code_of(error) or LaunchCode.PROCESS_NOT_STARTED, sentence)
                raise RefusedError(sentence, _FAILED) from error
            finally:
                console.close(timeout_s=1)
    if control.code is not None:
        _say(control.sentence, args)
        return control.code
    code, sentence = outcome_of(record, console.last_error)
    if sentence:
        _say(sentence, args)
    return code


def _check_stdin_elsewhere(command: Sequence[str]) -> None:
    """Checks stdin for a job whose ranks are started by agents."""
    if (refusal := standard_input.refusal_elsewhere(command)) is not None:
        raise RefusedError(refusal)
    if (sentence := standard_input.unread_elsewhere()) is not None:
        _say(sentence)


def _environment(args: argparse.Namespace) -> dict[str, str]:
    """The environment of the ranks: options beat the file, which beats the environment. Everything is checked here."""
    from_file = read_config(args.config_file) if args.config_file else {}
    from_flags = flags.flag_environment(args)
    sentence = flags.refusal(args)
    if sentence is not None:
        raise ValueError(sentence)
    # An empty setting counts as unset; an empty CUDA_VISIBLE_DEVICES says that there is no GPU.
    own = {name: value for name, value in os.environ.items() if value.strip() or not name.startswith("HOROVOD_")}
    environ = {**own, **from_file, **from_flags}
    settings = resolve(environ)
    task = None
    with contextlib.suppress(ValueError):  # variables of another launcher that contradict themselves concern no rank
        task = task_of(settings, environ)
    if task is not None and task.rank == 0:
        _say(
            f"This is one of {task.size} processes that {task.launcher} started, and each starts a job of its own. For "
            f"one job start horovodrun without {task.launcher}, or the program by {task.launcher} without horovodrun; "
            "HOROVOD_CLUSTER=none says that it is meant so."
        )
    return environ


def _hosts(args: argparse.Namespace) -> tuple[str, ...]:
    """The host of every rank that there may be, of which there are `args.num_proc` at first.

    ValueError for what can't be, RefusedError for what can't be had.
    """
    named = _named_hosts(args)
    count = args.num_proc or sum(host.slots for host in named or ())
    _check_elastic(args, count, len(named) if named is not None else None)
    args.num_proc = count
    spares = args.replacement.spares if args.replacement else 0
    hosts = named or (HostSlots("localhost", count + spares),)
    if named is None and args.replacement and args.replacement.greatest(count) > count + spares:
        _say(
            f"--max-np has no effect: no hosts are named, and this machine has {plural(count, 'slot')} then (-np).",
            args,
        )
    room = args.replacement.slots(sum(host.slots for host in hosts)) if args.replacement else count
    return fill(hosts, max(count, room))


def _named_hosts(args: argparse.Namespace) -> tuple[HostSlots, ...] | None:
    """The hosts that the command line or a batch system names; None when neither does."""
    if args.hosts is not None:
        return parse_hosts(args.hosts)
    if args.hostfile is not None:
        return parse_hostfile(args.hostfile)
    if lsf.present(os.environ) and args.host_discovery_script is None and args.coordinator is None:
        return lsf.allocated(os.environ)
    return None


def _check_elastic(args: argparse.Namespace, count: int, host_count: int | None) -> None:
    """Checks the options of elastic jobs, and sets `args.replacement`: how failed processes are replaced."""
    request = ElasticRequest(**{field: getattr(args, dest) for field, dest in _ELASTIC_DESTS.items()})
    request.check(count, host_count, _ELASTIC_FLAGS)
    args.replacement, args.supply = request.replacement(count), request.supply()
    if given := [_ELASTIC_FLAGS[field] for field in request.without_effect()]:
        remedy = "" if request.elastic else " --min-np or --host-discovery-script would make it elastic."
        reason = "no program finds its hosts" if request.elastic else "this job has a fixed size"
        _say(f"{joined(given)} {'has' if len(given) == 1 else 'have'} no effect: {reason}.{remedy}")


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


def _say(sentence: str, args: argparse.Namespace | None = None) -> None:
    """Writes a sentence on stderr. args: where they are known, they decide in which form."""
    row = ROWS["log_format"]
    given = vars(args).get(row.name) if args is not None else None
    text = line_of("error", "horovodrun", sentence) if (given or row.text(os.environ)) == "json" else None
    print(text or for_people(f"horovodrun: {sentence}"), file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_commandline()
