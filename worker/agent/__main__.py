"""`horovod-worker`: the agent of this host. Serves until SIGTERM, and then until the jobs that run there have ended."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import re
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil

from horovod.base.errors import ClusterCode, EngineCode, LaunchCode, code_of, coded
from horovod.base.processes import open_missing_streams
from horovod.base.protocol import __version__
from horovod.base.setting import split_address
from horovod.base.settings import resolve
from horovod.base.telemetry.logs import TextFormatter
from horovod.base.words import for_people, reason_of
from horovod.worker.agent.bound import read_order, serve_launcher
from horovod.worker.agent.cores_and_gpus import usable_cores, visible_gpus
from horovod.worker.agent.daemon import DRAIN_S, Daemon, Host
from horovod.worker.agent.shim_job import READER_GRACE_S
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.tls import ClientTls
from horovod.worker.runtime.token import given_token

EXIT_FAILED = 1
EXIT_USAGE = 2
_NAME = re.compile(r"[\w.-]{1,255}", re.ASCII)


def main(argv: Sequence[str] | None = None) -> int:
    open_missing_streams()
    arguments = make_parser().parse_args(argv)
    order: Mapping[str, Any] = {}
    if arguments.stdin:
        try:
            order = read_order()
        except ValueError:
            return _fail(coded(LaunchCode.WRONG_COMMAND_LINE, "There is no order on stdin."), EXIT_USAGE)
        arguments.name, arguments.slots = order["name"], order["slots"]
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter(f"%(asctime)s horovod-worker on {arguments.name}: %(message)s"))
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, handlers=[handler])
    logging.getLogger("grpc").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # each rank takes several descriptors
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        if order:
            sentence = serve_launcher(_host(arguments, order), order, os.environ, serve)
        else:
            settings = resolve()
            addresses = _addresses(arguments.coordinator or settings.coordinator or "")
            host = _host(arguments, order)
            sentence = asyncio.run(_serve(host, addresses, given_token(settings), ClientTls.of(settings)))
    except (ValueError, StartError) as error:
        return _fail(str(error), EXIT_USAGE)
    except OSError as error:
        return _fail(coded(code_of(error) or EngineCode.INTERNAL, reason_of(error)), EXIT_FAILED)
    return _fail(sentence, EXIT_FAILED) if sentence else 0


async def _serve(host: Host, addresses: Sequence[str], token: str | None, tls: ClientTls | None) -> str:
    daemon = Daemon(host, addresses, token, __version__, os.environ, tls)
    return await serve(daemon)


async def serve(daemon: Daemon) -> str:
    """Runs the agent, which signals drain or end. Returns the sentence why the agent had to give up, or ""."""
    loop = asyncio.get_running_loop()
    asked: list[int] = []

    def on_signal(signum: int) -> None:
        asked.append(signum)
        if len(asked) > 1 or signum == signal.SIGINT:
            daemon.end_all()
        else:
            daemon.drain()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, on_signal, signum)
    telling = asyncio.create_task(_announce(daemon))
    try:
        return await daemon.run()
    finally:
        telling.cancel()


async def _announce(daemon: Daemon) -> None:
    await daemon.registered.wait()
    print(f"horovod-worker serves {daemon.host.slots} slots as {daemon.host.name}", flush=True)


def _host(arguments: argparse.Namespace, order: Mapping[str, Any]) -> Host:
    settings = resolve()
    gpus, _ = visible_gpus(os.environ) if arguments.gpus is None else (arguments.gpus.split(","), "")
    gpus = [gpu for gpu in gpus if gpu]
    cpus = usable_cores()
    slots = arguments.slots if arguments.slots is not None else len(gpus) or max(1, int(cpus))
    state = arguments.state_dir or str(default_state(arguments.name))
    return Host(
        name=arguments.name,
        slots=slots,
        state=Path(state).absolute(),
        gpus=gpus,
        cpus=cpus,
        memory_bytes=psutil.virtual_memory().total,
        labels=dict(arguments.labels),
        network_interfaces=settings.network_interfaces,
        ports=str(order.get("ports") or settings.ports or ""),
        log_limit_bytes=arguments.log_limit_mb << 20,
        orphan_grace_s=arguments.orphan_grace_seconds,
        reader_grace_s=arguments.reader_grace_seconds,
        drain_s=arguments.drain_seconds,
    )


def default_state(name: str) -> Path:
    """The folder for an agent's jobs: systemd's StateDirectory, else root's, else the user's, else a temporary one."""
    if given := os.environ.get("STATE_DIRECTORY", "").partition(":")[0]:
        return Path(given) / name
    if os.geteuid() == 0:
        return Path("/var/lib/horovod") / name
    if home := os.environ.get("XDG_STATE_HOME", ""):
        return Path(home) / "horovod" / name
    if home := os.environ.get("HOME", ""):
        return Path(home) / ".local/state/horovod" / name
    return Path(tempfile.gettempdir()) / f"horovod-{os.geteuid()}" / "agents" / name


def _addresses(text: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        sentence = (
            "There is no coordinator to serve: give --coordinator host:port, or several separated by commas (or "
            "HOROVOD_COORDINATOR)."
        )
        raise ValueError(coded(ClusterCode.NO_COORDINATOR_NAMED, sentence))
    for address in found:
        split_address(address, "--coordinator")
    return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(coded(LaunchCode.WRONG_COMMAND_LINE, message))


def make_parser() -> argparse.ArgumentParser:
    """Also for the manual."""
    parser = _Parser(
        prog="horovod-worker",
        description="The agent of a host: starts, watches and ends training processes for a coordinator, and keeps "
        "their output. SIGTERM drains the host: ranks of elastic jobs leave, and the agent exits when its other jobs "
        "have ended. A second signal ends those jobs.",
        epilog="The token comes from HOROVOD_TOKEN or HOROVOD_TOKEN_FILE.",
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    parser.add_argument(
        "--coordinator", metavar="A:29400,B:29400", help="addresses of the coordinators (default: HOROVOD_COORDINATOR)"
    )
    parser.add_argument(
        "--name",
        type=_name,
        metavar="NAME",
        default=socket.gethostname(),
        help="name of this host in the cluster (default: its host name)",
    )
    parser.add_argument(
        "--slots",
        type=_count,
        metavar="N",
        help="number of processes that may run on this host (default: its number of GPUs, or of cores)",
    )
    parser.add_argument(
        "--gpus", metavar="IDS", help="GPUs to use, written as for CUDA_VISIBLE_DEVICES (default: all that are found)"
    )
    parser.add_argument(
        "--labels",
        type=_label,
        nargs="+",
        action="extend",
        default=[],
        metavar="K=V",
        help="labels by which jobs choose hosts",
    )
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help="folder for jobs and their output (default: a folder with the host's name in STATE_DIRECTORY of systemd, "
        "/var/lib/horovod for root, otherwise ~/.local/state/horovod)",
    )
    parser.add_argument(
        "--log-limit-mb",
        type=_count,
        default=64,
        metavar="MB",
        help="how much output of each rank is kept (default: %(default)s MB)",
    )
    parser.add_argument(
        "--orphan-grace-seconds",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="how long ranks run on without an agent after this one was killed (default: %(default)g seconds)",
    )
    parser.add_argument(
        "--reader-grace-seconds",
        type=_seconds,
        default=READER_GRACE_S,
        metavar="S",
        help="how long a rank whose log is full waits for a launcher that is gone (default: %(default)g seconds)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=_seconds,
        default=DRAIN_S,
        metavar="S",
        help="how long ranks of elastic jobs may take to leave when this agent drains (default: %(default)g seconds)",
    )
    parser.add_argument("--verbose", action="store_true", help="log jobs and processes as they start and end")
    parser.add_argument("--stdin", action="store_true", help=argparse.SUPPRESS)  # for horovodrun: see bound.py
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 on")
    return seconds


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name for a host: letters, digits, dots, dashes, underscores")
    return text


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= 1 << 16:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {1 << 16}, not {text!r}")
    return int(text)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"expected key=value, not {text!r}")
    return key, value


def _fail(sentence: str, code: int) -> int:
    print(for_people(f"horovod-worker: {sentence}"), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
