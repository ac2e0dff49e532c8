"""The command line of `horovodrun`. Options that are settings come from the settings table; the rest is listed here.

An option that would change the job and does not exist yet is refused in a sentence (`refusal`). One that is accepted
and has no effect says so in --help; if it is a setting, rank 0 says so at hvd.init() when it is used.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

from horovod import __version__
from horovod.runner.job_flags import add_job_flags
from horovod.worker.setting import Setting
from horovod.worker.settings import MAX_SIZE, ROWS, SETTINGS

# Options of earlier versions that mean the same as one in the table: (option, the value it stores). --help hides them.
_OLD_SPELLINGS = {
    "--log-without-timestamp": (
        ("--log-with-timestamp", False),
        ("--log-hide-timestamp", True),
        ("--no-log-hide-timestamp", False),
    ),
}
_ELASTIC = "elastic jobs are not available yet; leave it out for a job of a fixed size"
_MPI = "there is no MPI in this build; leave it out, horovodrun needs none"
# What would change the job, by attribute of the parsed arguments, and why it cannot be had.
_REFUSED = {
    "min_num_proc": ("--min-np", _ELASTIC),
    "max_num_proc": ("--max-np", _ELASTIC),
    "slots_per_host": ("--slots-per-host", _ELASTIC),
    "reset_limit": ("--reset-limit", _ELASTIC),
    "blacklist_cooldown_range": ("--blacklist-cooldown-range", _ELASTIC),
    "host_discovery_script": ("--host-discovery-script", _ELASTIC),
    "mpi": ("--mpi", _MPI),
    "jsrun": ("--jsrun", "there is no jsrun launcher in this build; leave it out"),
    "mpi_args": ("--mpi-args", _MPI),
    "tcp": ("--tcp", _MPI),
    "binding_args": ("--binding-args", _MPI),
}


class Parser(argparse.ArgumentParser):
    """Answers a mistake with one sentence instead of half a page of usage."""

    def error(self, message: str) -> NoReturn:
        """Exits with 2."""
        self.exit(2, f"{self.prog}: {message[:1].upper()}{message[1:].rstrip('.')} (see {self.prog} --help).\n")


def make_parser() -> Parser:
    """Knows the options that are listed here and those of the settings table."""
    parser = Parser(
        prog="horovodrun",
        description="Starts a training program as several processes that train together.",
        usage="horovodrun -np N [options] command [arguments]",
        epilog="Example: horovodrun -np 2 python train.py. Settings may also stand in --config-file or in the "
        "environment; an option beats the file, and the file beats the environment.",
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    parser.add_argument("-np", "--num-proc", type=int, metavar="N", help="number of processes")
    parser.add_argument("-cb", "--check-build", action="store_true", help="show what this build can do, and exit")
    parser.add_argument("--disable-cache", action="store_true", help="accepted; nothing is cached")
    parser.add_argument("--output-filename", metavar="DIR", help="also write DIR/rank.N/stdout and stderr")
    parser.add_argument(
        "-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true", help="put the time before each line"
    )
    parser.add_argument("--verbose", action="store_true", help="say what the launcher does; show tracebacks")
    parser.add_argument("--config-file", metavar="YAML", help="file with settings")

    hosts = parser.add_argument_group("hosts")
    hosts.add_argument("-H", "--hosts", metavar="H1:2,H2:4", help="hosts and their slots; default is localhost")
    hosts.add_argument("-hostfile", "--hostfile", metavar="FILE", help="file with lines `host slots=count`")
    hosts.add_argument("--network-interface", action="append", metavar="NIC", help="one interface for TCP; repeatable")
    hosts.add_argument(
        "-p", "--ssh-port", type=int, metavar="PORT", help="for other hosts, which are not available yet"
    )
    hosts.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="for other hosts, which are not available yet")

    add_job_flags(parser)

    elastic = parser.add_argument_group("elastic (not available yet)")
    elastic.add_argument("--min-np", "--min-num-proc", dest="min_num_proc", type=int, metavar="N")
    elastic.add_argument("--max-np", "--max-num-proc", dest="max_num_proc", type=int, metavar="N")
    elastic.add_argument("--slots-per-host", type=int, metavar="N")
    elastic.add_argument("--reset-limit", type=int, metavar="N")
    elastic.add_argument("--blacklist-cooldown-range", type=int, nargs=2, metavar=("MIN", "MAX"))
    elastic.add_argument("--host-discovery-script", metavar="SCRIPT")

    controller = parser.add_argument_group("controller").add_mutually_exclusive_group()
    controller.add_argument("--gloo", action="store_true", help="accepted; the built-in controller needs no MPI either")
    controller.add_argument("--mpi", action="store_true", help="not available")
    controller.add_argument("--jsrun", action="store_true", help="not available")
    mpi = parser.add_argument_group("MPI (not available)")
    mpi.add_argument("--mpi-args", metavar="ARGS")
    mpi.add_argument("--tcp", action="store_true")
    mpi.add_argument("--binding-args", metavar="ARGS")

    settings = parser.add_argument_group("settings")
    for setting in SETTINGS:
        if setting.flag is not None:
            _add_setting(settings, setting, setting.flag)
    return parser


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Options and, as `command`, the program with its arguments. Exits with 2 on a mistake."""
    parser = make_parser()
    end = _command_start(parser, argv)
    args = parser.parse_args(argv[:end])
    args.command = list(argv[end + 1 :] if argv[end : end + 1] == ["--"] else argv[end:])
    if args.check_build:
        return args
    if args.num_proc is None:
        parser.error("-np is missing: say how many processes to start, for example -np 2")
    if args.num_proc < 1:
        parser.error(f"-np must be >= 1, not {args.num_proc}")
    if args.num_proc > MAX_SIZE:
        parser.error(f"-np must be at most {MAX_SIZE}, not {args.num_proc}")
    if args.hosts is not None and args.hostfile is not None:
        parser.error("-H and -hostfile exclude each other: name the hosts in one of them")
    if not args.command:
        parser.error("there is no command to run: write it last, for example horovodrun -np 2 python train.py")
    return args


def flag_environment(args: argparse.Namespace) -> dict[str, str]:
    """Environment variables for the settings that were given as options. ValueError for a bad value."""
    environ: dict[str, str] = {}
    for setting in SETTINGS:
        if setting.flag is not None and (value := getattr(args, _dest(setting.flag))) is not None:
            environ[setting.env] = setting.from_option(value, setting.flag)
    if args.network_interface:
        # The two options add up. In one --network-interface several names may stand, as in earlier versions.
        names = [*",".join(args.network_interface).split(","), *(args.network_interfaces or "").split(",")]
        environ |= interface_variable(names, "--network-interface")
    return environ


def interface_variable(names: Iterable[str], source: str) -> dict[str, str]:
    """The environment variable for `names`, each once; ValueError naming `source` when there is none."""
    setting = ROWS["network_interfaces"]
    given = dict.fromkeys(name.strip() for name in names)
    return {setting.env: setting.from_option(",".join(name for name in given if name), source)}


def refusal(args: argparse.Namespace) -> str | None:
    """The sentence for the first option that cannot be had."""
    for dest, (flag, reason) in _REFUSED.items():
        if getattr(args, dest) not in (None, False):
            return f"{flag} is not usable: {reason}."
    return None


def _add_setting(group: argparse._ArgumentGroup, setting: Setting, flag: str) -> None:
    dest = _dest(flag)
    text = setting.meaning().replace("%", "%%")
    if setting.kind == "bool":
        opposite = "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else "--no-" + flag.removeprefix("--")
        other_help = f"the opposite of {flag}" if setting.default else argparse.SUPPRESS
        group.add_argument(flag, dest=dest, action="store_const", const=True, default=None, help=text)
        for other, value in _OLD_SPELLINGS.get(flag, ((opposite, False),)):
            group.add_argument(other, dest=dest, action="store_const", const=value, help=other_help)
        return
    shown = setting.flag_unit or setting.unit or setting.env.split("_")[-1]
    group.add_argument(flag, dest=dest, metavar=shown.upper(), help=text)


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _command_start(parser: Parser, argv: Sequence[str]) -> int:
    """Where the options end. argparse's own REMAINDER would also interpret the arguments of the program."""
    actions = {option: action for action in parser._actions for option in action.option_strings}
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("-", "--"):
        name, equals, _ = argv[at].partition("=")
        matches = {name} & actions.keys()
        if not matches and name.startswith("--"):
            matches = {option for option in actions if option.startswith(name)}
        if not matches and name[:2] in actions and not name.startswith("--"):
            matches, equals = {name[:2]}, "="  # a short option with its value attached: -p22
        if not matches:
            close = difflib.get_close_matches(name, actions, n=1)
            parser.error(f"there is no option {name}" + (f"; did you mean {close[0]}?" if close else ""))
        takes = actions[min(matches)].nargs  # several matches: argparse says that the option is ambiguous
        at += 1 if equals else 1 + (1 if takes is None else int(takes))
    return min(at, len(argv))
