"""The command line of `horovodrun`. Options that are settings come from the settings table; the rest is listed here.

An option is never ignored. One that would change the job and is not there is refused in a sentence that says what to
use instead (`refusal`; elastic jobs: launch/elastic/request.py). One that is accepted and has no effect says so in
--help; if it is a setting, rank 0 says so at hvd.init() when it is used.
"""

from __future__ import annotations

import argparse
import difflib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from horovod.base.errors import LaunchCode, SettingCode, code_of, coded, without_code
from horovod.base.protocol import __version__
from horovod.base.setting import Setting
from horovod.base.settings import MAX_SIZE, ROWS, SETTINGS
from horovod.rendezvous.hosts import in_lsf_job

# Options of earlier versions that mean the same as one in the table: (option, the value it stores, what to write in its
# place where it is deprecated). --help hides them.
_OLD_SPELLINGS = {
    "--log-without-timestamp": (
        ("--log-with-timestamp", False, None),
        ("--log-hide-timestamp", True, "--log-without-timestamp"),
        ("--no-log-hide-timestamp", False, "--log-with-timestamp"),
    ),
}
# Shown besides the opposites of switches that are on, or whose default depends.
_SHOWN_OPPOSITES = ("--no-mpi-threads-disable",)
# First words that start no job (commands.py), with what --help says of each.
COMMANDS = {
    "submit": "run a job file on registered agents",
    "ps": "list the jobs of a coordinator",
    "logs": "show the output of a job",
    "stop": "stop a job",
    "wait": "wait for a job, and end with its exit code",
    "certs": "make a certificate authority for a cluster, and certificates for its coordinators and its processes",
    "token": "make a token that is valid for one job only",
    "help": "show this page, or the page of a command: horovodrun help ps",
}
_ITSELF = "the processes that it starts form a world by themselves"
# Options that are refused, by attribute of the parsed arguments, with the sentence that says what to do instead.
_REFUSED = {
    "mpi": f"there is no MPI in this build. Write `mpirun -np N ...` in place of horovodrun: {_ITSELF}",
    "jsrun": f"horovodrun does not start jsrun. Write `jsrun ...` in place of horovodrun: {_ITSELF}",
    "mpi_args": f"horovodrun starts no mpirun. Give them to mpirun in place of horovodrun: {_ITSELF}",
    "binding_args": "horovodrun starts no mpirun. Give them to mpirun or jsrun in place of horovodrun, or "
    "bind the background threads with --thread-affinity",
}
# Options without effect, by attribute of the parsed arguments; the reason completes "--gloo has no effect: ...".
_IDLE = {
    "disable_cache": "horovodrun caches nothing",
    "gloo": "there is one controller, which needs no MPI",
}
_NOT_NEGATIVE = {
    "ssh_port": "--ssh-port",
    "min_num_proc": "--min-np",
    "max_num_proc": "--max-np",
    "slots_per_host": "--slots-per-host",
    "spares": "--spares",
    "reset_limit": "--reset-limit",
}


class Parser(argparse.ArgumentParser):
    """Answers a mistake with one sentence instead of half a page of usage."""

    def error(self, message: str) -> NoReturn:
        """Exits with 2."""
        said = without_code(message).rstrip(".")
        sentence = f"{self.prog}: {said[:1].upper()}{said[1:]} (see {self.prog} --help)."
        self.exit(2, f"{coded(code_of(message) or LaunchCode.WRONG_COMMAND_LINE, sentence)}\n")


def make_parser() -> Parser:
    """Knows the options that are listed here and those of the settings table."""
    parser = Parser(
        prog="horovodrun",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # for the list of commands
        description="Starts a training program as several processes that train together.\n\n"
        "commands (as the first word):\n" + "\n".join(f"  {name:8}{text}" for name, text in COMMANDS.items()),
        usage="horovodrun -np N [options] program [arguments]\n       horovodrun {" + ",".join(COMMANDS) + "} ...",
        epilog="Example: horovodrun -np 2 python train.py\n\n"
        "Settings can also be given in --config-file or in the environment. An option overrides\n"
        "the file, and the file overrides the environment.",
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    parser.add_argument("-np", "--num-proc", type=int, metavar="N", help="number of processes")
    parser.add_argument("-cb", "--check-build", action="store_true", help="show what this build can do, and exit")
    parser.add_argument(
        "--completion", choices=("bash", "zsh", "fish"), metavar="SHELL", help="print a completion script, and exit"
    )
    parser.add_argument("--disable-cache", action="store_true", help="no effect: horovodrun caches nothing")
    parser.add_argument(
        "--check",
        action="store_true",
        help="read scripts, or folders of scripts, without running them, and list the lines that fail or behave "
        "differently than with earlier versions; exit with 1 if there are any",
    )
    parser.add_argument("--output-filename", metavar="DIR", help="also write DIR/rank.N/stdout and stderr")
    parser.add_argument(
        "-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true", help="put the time before each line"
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="report what the launcher does and what happens to the job, and show tracebacks",
    )
    parser.add_argument("--config-file", metavar="YAML", help="file with settings")

    hosts = parser.add_argument_group("hosts")
    hosts.add_argument(
        "-H", "--hosts", metavar="H1:2,H2:4", help="hosts, each with its number of slots (default: localhost)"
    )
    hosts.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help="file with a line `host slots=count` for each host"
    )
    hosts.add_argument(
        "--network-interface",
        action="append",
        metavar="NIC",
        help="a network interface for TCP between ranks; may be repeated",
    )
    hosts.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="port of sshd on other hosts")
    hosts.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh to other hosts")
    hosts.add_argument(
        "--ssh-host-keys",
        choices=("yes", "accept-new", "no"),
        help="whether ssh accepts hosts whose keys it does not know: no host (yes), new ones (accept-new) or all (no); "
        "default: as ssh is configured, without a prompt",
    )

    add_job_flags(parser)

    # --min-np or --host-discovery-script makes a job elastic: its failed processes are replaced. The others have no
    # meaning without one of them.
    elastic = parser.add_argument_group("elastic jobs")
    elastic.add_argument(
        "--min-np",
        "--min-num-proc",
        dest="min_num_proc",
        type=int,
        metavar="N",
        help="smallest number of processes with which the job continues (default: -np)",
    )
    elastic.add_argument(
        "--max-np",
        "--max-num-proc",
        dest="max_num_proc",
        type=int,
        metavar="N",
        help="largest number of processes to which the job grows (default: no limit)",
    )
    elastic.add_argument(
        "--host-discovery-script",
        metavar="SCRIPT",
        help="program that prints a line `host:slots` for each host; run every second",
    )
    elastic.add_argument(
        "--slots-per-host",
        type=int,
        metavar="N",
        help="slots of a host for which the discovery script prints no number",
    )
    elastic.add_argument(
        "--reset-limit",
        type=int,
        metavar="N",
        help="end the job after this many replaced processes (default: 3 * -np without progress), or, with a discovery "
        "script, after this many changes of hosts",
    )
    elastic.add_argument(
        "--blacklist-cooldown-range",
        type=int,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="use a failed host again after MIN to MAX seconds, each from 1 to 3600 (default: never)",
    )

    elastic.add_argument(
        "--spares", type=int, metavar="N", help="processes beyond --max-np (default: -np) that wait as replacements"
    )

    controller = parser.add_argument_group("controller").add_mutually_exclusive_group()
    controller.add_argument(
        "--gloo", action="store_true", help="no effect: there is one controller, which needs no MPI"
    )
    controller.add_argument("--mpi", action="store_true", help="not available: write mpirun in place of horovodrun")
    controller.add_argument("--jsrun", action="store_true", help="not available: write jsrun in place of horovodrun")
    mpi = parser.add_argument_group("MPI and jsrun")
    mpi.add_argument("--mpi-args", metavar="ARGS", help="not available: give them to mpirun in place of horovodrun")
    mpi.add_argument(
        "--tcp",
        action="store_true",
        help="do not use InfiniBand for NCCL (NCCL_IB_DISABLE=1); Horovod's own connections are always TCP",
    )
    mpi.add_argument(
        "--binding-args", metavar="ARGS", help="not available: give them to mpirun or jsrun in place of horovodrun"
    )

    settings = parser.add_argument_group("settings")
    for setting in SETTINGS:
        if setting.flag is not None:
            _add_setting(settings, setting, setting.flag)
    return parser


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Options and, as `command`, the program with its arguments. Exits with 2 on a mistake of form; ValueError for a
    number that can't be. Deprecated spellings are a DeprecationWarning."""
    parser = make_parser()
    end = _command_start(parser, argv)
    args = parser.parse_args(argv[:end])
    args.command = list(argv[end + 1 :] if argv[end : end + 1] == ["--"] else argv[end:])
    if args.check and not args.command:
        parser.error("--check needs the scripts or folders to read, for example horovodrun --check train.py")
    if args.check_build or args.completion or args.check:
        return args
    if args.num_proc is None and not in_lsf_job(os.environ):
        word = args.command[0] if args.command and end == 0 else ""
        close = difflib.get_close_matches(word, COMMANDS, n=1)
        meant = f"there is no command {word}; did you mean {close[0]}? To start a program, " if close else ""
        parser.error(f"{meant or '-np is missing: '}say how many processes to start, for example -np 2")
    named = {"-H": args.hosts, "-hostfile": args.hostfile, "--host-discovery-script": args.host_discovery_script}
    given = [flag for flag, value in named.items() if value is not None]
    if len(given) > 1:
        sentence = f"{' and '.join(given)} exclude each other: name the hosts in one of them"
        parser.error(coded(LaunchCode.CONFLICTING_OPTIONS, sentence))
    if not args.command:
        parser.error("there is no command to run: write it last, for example horovodrun -np 2 python train.py")
    _check_numbers(args)
    if any("," in names for names in args.network_interface or ()):
        warn_deprecated("several names in one --network-interface", "--network-interfaces a,b")
    for dest, why in _IDLE.items():
        if getattr(args, dest):
            flag = "--" + dest.replace("_", "-")
            warnings.warn(f"{flag} has no effect: {why}.", DeprecationWarning, stacklevel=2)
    return args


def _check_numbers(args: argparse.Namespace) -> None:
    if args.num_proc is not None and not 1 <= args.num_proc <= MAX_SIZE:
        limit = ">= 1" if args.num_proc < 1 else f"at most {MAX_SIZE}"
        raise ValueError(coded(SettingCode.INVALID_SETTING, f"-np must be {limit}, not {args.num_proc}."))
    for dest, flag in _NOT_NEGATIVE.items():
        if (value := getattr(args, dest)) is not None and value < 0:
            raise ValueError(coded(SettingCode.INVALID_SETTING, f"{flag} must be >= 0, not {value}."))


def warn_deprecated(old: str, new: str) -> None:
    """The warning for a spelling of earlier versions."""
    warnings.warn(f"{old} is deprecated: write {new}.", DeprecationWarning, stacklevel=3)


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
    if args.tcp:
        environ["NCCL_IB_DISABLE"] = "1"
    return environ


def interface_variable(names: Iterable[str], source: str) -> dict[str, str]:
    """The environment variable for `names`, each once; ValueError naming `source` when there is none."""
    setting = ROWS["network_interfaces"]
    given = dict.fromkeys(name.strip() for name in names)
    return {setting.env: setting.from_option(",".join(name for name in given if name), source)}


def refusal(args: argparse.Namespace) -> str | None:
    """The sentence for the first option that cannot be had."""
    for dest, reason in _REFUSED.items():
        if getattr(args, dest) not in (None, False):
            return coded(LaunchCode.UNSUPPORTED_OPTION, f"--{dest.replace('_', '-')} is not usable: {reason}.")
    return None


def _add_setting(group: argparse._ArgumentGroup, setting: Setting, flag: str) -> None:
    dest = _dest(flag)
    text = setting.option_meaning().replace("%", "%%")
    if setting.kind == "bool":
        opposite = "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else "--no-" + flag.removeprefix("--")
        visible = setting.default is not False or opposite in _SHOWN_OPPOSITES
        other_help = f"turn {flag} off" if visible else argparse.SUPPRESS
        group.add_argument(flag, dest=dest, action="store_const", const=True, default=None, help=text)
        for other, value, instead in _OLD_SPELLINGS.get(flag, ((opposite, False, None),)):
            group.add_argument(other, dest=dest, action=_Switch, const=value, instead=instead, help=other_help)
        return
    group.add_argument(flag, dest=dest, metavar=setting.metavar(), help=text)


class _Switch(argparse.Action):
    """Stores a constant; `instead` is what to write in place of a deprecated spelling."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, instead: str | None, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **more)
        self._instead = instead

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        if self._instead is not None:
            warn_deprecated(str(option), self._instead)
        setattr(namespace, self.dest, self.const)


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


def add_job_flags(parser: argparse.ArgumentParser) -> None:
    """Adds these options to the parser, as a group of their own."""
    jobs = parser.add_argument_group("jobs on registered agents")
    jobs.add_argument(
        "--coordinator",
        metavar="A:29400,B:29400",
        help="run the job on the agents that are registered at this coordinator; HOROVOD_COORDINATOR alone does not do "
        "that",
    )
    jobs.add_argument(
        "--detach",
        action="store_true",
        help="print the job's id and return at once; `horovodrun logs -f ID` shows the output",
    )
    jobs.add_argument("--job-name", metavar="NAME", help="first part of the job's id (default: the program's name)")
    jobs.add_argument("--gpus-per-process", type=_number(int), metavar="N", help="number of GPUs for each process")
    jobs.add_argument("--cpus-per-process", type=_number(float), metavar="X", help="number of CPUs for each process")
    jobs.add_argument(
        "--memory-gb-per-process", type=_number(float), metavar="GB", help="memory for each process, in GB"
    )
    jobs.add_argument(
        "--label",
        action="append",
        default=[],
        type=_label,
        metavar="K=V",
        help="use only hosts with this label; may be repeated",
    )


def misplaced(args: argparse.Namespace) -> str:
    """The sentence for an option that means something only with --coordinator; empty when there is none."""
    given = {
        "--detach": args.detach,
        "--gpus-per-process": args.gpus_per_process,
        "--cpus-per-process": args.cpus_per_process,
        "--memory-gb-per-process": args.memory_gb_per_process,
        "--label": args.label,
    }
    for flag, value in given.items():
        if value:
            sentence = f"{flag} is for jobs on registered agents: name their coordinator with --coordinator host:port."
            return coded(LaunchCode.CONFLICTING_OPTIONS, sentence)
    return ""


def unused_coordinator(environ: Mapping[str, str]) -> str:
    """The sentence for somebody who names a cluster in the environment, and starts a job without it; else empty.

    The variable says where a process joins its world, and `ps` and the like where to ask. A launcher that took it for
    an order would send a job that is started within a rank to the coordinator of that rank's own job.
    """
    named = ROWS["coordinator"].text(environ).strip()
    if not named or ROWS["rank"].text(environ):
        return ""
    return (
        f"HOROVOD_COORDINATOR names {named}, which this job does not use: this launcher starts its processes itself. "
        f"`horovodrun --coordinator {named} ...` runs it on the agents that are registered there."
    )


def _number(kind: type[int] | type[float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value: float = kind(text)
        except ValueError:
            value = -1
        if not 0 <= value < 1e9:
            raise argparse.ArgumentTypeError(f"expected a number >= 0, not {text!r}")
        return value

    return read


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"expected key=value, not {text!r}")
    return key, value
