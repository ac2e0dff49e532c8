"""Options of `horovodrun` for jobs on agents (`--coordinator`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from horovod.base.errors import LaunchCode, coded
from horovod.base.settings import ROWS


def add_job_flags(parser: argparse.ArgumentParser) -> None:
    """Adds these options to the parser, as a group of their own."""
    jobs = parser.add_argument_group("jobs on registered agents")
    jobs.add_argument(
        "--coordinator",
        metavar="A:29400,B:29400",
        help="run on the agents that are registered there; HOROVOD_COORDINATOR alone does not do that",
    )
    jobs.add_argument("--detach", action="store_true", help="print the job's id and leave; see `horovodrun logs -f ID`")
    jobs.add_argument("--job-name", metavar="NAME", help="what the job's id begins with; default: the program's name")
    jobs.add_argument("--gpus-per-process", type=_number(int), metavar="N", help="GPUs that each process gets")
    jobs.add_argument("--cpus-per-process", type=_number(float), metavar="X", help="CPUs that each process needs")
    jobs.add_argument("--memory-gb-per-process", type=_number(float), metavar="GB", help="memory that each needs")
    jobs.add_argument(
        "--label", action="append", default=[], type=_label, metavar="K=V", help="only on hosts with it; repeatable"
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
