"""Options of `horovodrun` for jobs on agents (`--coordinator`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def add_job_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them as a group of their own."""
    jobs = parser.add_argument_group("jobs on registered agents")
    jobs.add_argument("--coordinator", metavar="A:29400,B:29400", help="run on the agents that are registered there")
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
            return f"{flag} is for jobs on registered agents: name their coordinator with --coordinator host:port."
    return ""


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
