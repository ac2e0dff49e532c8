"""Commands of `horovodrun` that start no job: what a cluster's operator makes once, and jobs that were submitted.

A program named like one of them is started by its path, or after the options that a job needs anyway (`horovodrun -np 2
certs`): only the first word counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from horovod.base.errors import LaunchCode, coded
from horovod.base.words import for_people
from horovod.launch.command_line.flags import COMMANDS, Parser

_FAILED = 1
_USAGE = 2


def run(argv: Sequence[str]) -> int:
    """Runs a command and returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        if hasattr(args, "code"):  # cluster/job_commands.py
            code: int = args.code(args)
            return code
        print(for_people(args.work(args)))
    except ValueError as error:
        return _fail(str(error), _USAGE)
    except (OSError, RuntimeError) as error:
        return _fail(getattr(error, "strerror", None) or str(error), _FAILED)
    return 0


def _certs(args: argparse.Namespace) -> str:
    from horovod.base.certificates import make, renew

    hosts = [host.strip() for host in (args.hosts or "").split(",") if host.strip()]
    folder = Path(args.folder)
    if args.renew:
        return renew(folder, hosts, args.days)
    if not hosts:
        sentence = "--hosts is missing: name the hosts and addresses of the coordinator, like node-a,10.0.0.1."
        raise ValueError(coded(LaunchCode.WRONG_COMMAND_LINE, sentence))
    return make(folder, hosts, args.days)


def _token(args: argparse.Namespace) -> str:
    from horovod.base.proofs import job_token
    from horovod.base.tokens import read_token

    return job_token(read_token(args.token_file), args.job)


def _parser() -> Parser:
    parser = Parser(prog="horovodrun")
    commands = parser.add_subparsers(required=True, parser_class=Parser)
    certs = commands.add_parser(
        "certs",
        prog="horovodrun certs",
        usage="horovodrun certs DIR --hosts H1,H2,... [--days N] [--renew]",
        help=COMMANDS["certs"],
        description="Makes ca.pem and ca.key (the authority), coordinator.pem and .key, client.pem and .key in DIR. "
        "Keep ca.key on a host on which no training runs: everybody who can read it can make certificates.",
    )
    certs.add_argument(
        "folder", metavar="DIR", help="folder for the files; created if it does not exist. No file in it is overwritten"
    )
    certs.add_argument(
        "--hosts", metavar="H1,H2,...", help="names and addresses of the coordinators, as processes connect to them"
    )
    certs.add_argument(
        "--days", type=int, default=365, metavar="N", help="validity of the certificates (default: %(default)s days)"
    )
    certs.add_argument(
        "--renew",
        action="store_true",
        help="replace coordinator.pem and client.pem, signed by the existing authority and for the same hosts unless "
        "--hosts names others; running coordinators and processes load them without a restart",
    )
    certs.set_defaults(work=_certs)
    token = commands.add_parser(
        "token",
        prog="horovodrun token",
        usage="horovodrun token JOB --token-file FILE",
        help=COMMANDS["token"],
        description="Prints a token that is valid for one job only, derived from the token of the cluster. "
        "Nothing is stored.",
    )
    token.add_argument("job", metavar="JOB", help="name of the job (HOROVOD_JOB)")
    token.add_argument("--token-file", metavar="FILE", required=True, help="file with the token of the coordinators")
    token.set_defaults(work=_token)
    # Late: it brings protobuf, which launchers load after checks.
    from horovod.launch.cluster.job_commands import add_job_commands

    add_job_commands(commands, Parser)
    return parser


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, for completion and the manual."""
    found = next(one for one in _parser()._actions if isinstance(one, argparse._SubParsersAction))
    return dict(found.choices)


def _fail(sentence: str, code: int) -> int:
    print(for_people(f"horovodrun: {sentence}"), file=sys.stderr)
    return code
