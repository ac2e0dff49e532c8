"""The command `horovodrun`: reads the command line, runs the job, ends with the exit code that the job deserves."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence

from horovod.base.errors import EngineCode, code_of, coded, without_code
from horovod.base.processes import open_missing_streams
from horovod.base.settings import resolve
from horovod.launch import commands
from horovod.launch.asked import FAILED, USAGE, Asked, RefusedError, in_words, say
from horovod.launch.command_line import flags
from horovod.launch.command_line.config_file import read_config
from horovod.launch.launchers import launcher_of
from horovod.rendezvous import task_of

_INTERRUPTED = 128 + signal.SIGINT


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked for form; `command` holds the program and its arguments."""
    return flags.parse_args(sys.argv[1:] if argv is None else argv)


def run_commandline(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command. Returns when all went well, else exits through SystemExit."""
    open_missing_streams()
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "help":
        argv = [*argv[1:2], "--help"]
    if argv and argv[0] in flags.COMMANDS:
        sys.exit(commands.run(argv))
    verbose = False
    args: argparse.Namespace | None = None
    try:
        args = _parse_and_warn(argv)
        verbose = args.verbose
        code = _show(args) if args.check_build or args.completion or args.check else _launch(args)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except Exception as error:
        if verbose:
            traceback.print_exc()
        # RefusedError, ValueError and OSError carry a sentence for users; the type helps with others only.
        known = isinstance(error, RefusedError | ValueError | OSError | RuntimeError)
        text = f"{in_words(error)}." if isinstance(error, OSError) else str(error)
        if not known:
            text = f"{type(error).__name__}: {without_code(error)} (--verbose shows where)."
        if not known or isinstance(error, OSError):
            text = coded(code_of(error) or EngineCode.INTERNAL, text)
        say(text, args)
        code = error.code if isinstance(error, RefusedError) else USAGE if isinstance(error, ValueError) else FAILED
    if code != 0:
        sys.exit(code)


def _parse_and_warn(argv: Sequence[str] | None) -> argparse.Namespace:
    """Deprecated spellings are named in a line each, as all that the launcher says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeprecationWarning)
        args = parse_args(argv)
    for warning in caught:
        say(str(warning.message))
    return args


def _show(args: argparse.Namespace) -> int:
    """Answers options for which no job is needed, such as --check-build."""
    if args.check:
        from horovod.launch.check.files import check

        return check(args.command)
    if args.completion:
        from horovod.launch.command_line.completion import script

        print(script(args.completion, flags.make_parser(), commands.parsers()), end="")
    else:
        from horovod.launch.command_line.check_build import check_build

        print(check_build(), end="")
    return 0


def _launch(args: argparse.Namespace) -> int:
    asked = Asked(args, _environment(args))
    if args.coordinator is None:
        if alone := flags.misplaced(args):
            raise RefusedError(alone)
        if unused := flags.unused_coordinator(os.environ):
            say(unused, args)
    return launcher_of(asked).launch(asked)


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
        say(
            f"This is one of {task.size} processes that {task.launcher} started, and each of them would start "
            f"its own job. For one job, start horovodrun without {task.launcher}, or start the program by "
            f"{task.launcher} without horovodrun. If you want one job in each process, set "
            "HOROVOD_CLUSTER=none."
        )
    return environ


if __name__ == "__main__":
    run_commandline()
