"""What a command line of `horovodrun`, or a call of `horovod.run`, asks for, as far as launchers share it; and how a
launcher answers a person.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from horovod.base.errors import LaunchCode, coded, without_code
from horovod.base.settings import ROWS
from horovod.base.telemetry.logs import line_of
from horovod.base.words import for_people, is_out_of_descriptors, joined, plural, reason_of
from horovod.launch.console import standard_input
from horovod.launch.elastic.request import ElasticRequest, Replacement, Supply
from horovod.rendezvous.hosts import HostSlots, fill, in_lsf_job, lsf_hosts, parse_hostfile, parse_hosts

if TYPE_CHECKING:
    from horovod.worker.agent.output import Console

USAGE = 2  # exit codes of a launcher
FAILED = 1

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

    def __init__(self, sentence: str, code: int = USAGE) -> None:
        super().__init__(sentence)
        self.code = code


@dataclass
class Asked:
    """A command line, and the environment of its ranks."""

    args: argparse.Namespace
    environ: dict[str, str]

    @functools.cached_property
    def hosts(self) -> tuple[str, ...]:
        """The host of every rank that there may be, of which there are `args.num_proc` at first.

        ValueError for what can't be, RefusedError for what can't be had.
        """
        args, named = self.args, self.named_hosts()
        count = args.num_proc or sum(host.slots for host in named or ())
        self.check_elastic(count, len(named) if named is not None else None)
        args.num_proc = count
        spares = args.replacement.spares if args.replacement else 0
        hosts = named or (HostSlots("localhost", count + spares),)
        if named is None and args.replacement and args.replacement.greatest(count) > count + spares:
            say(
                f"--max-np has no effect: no hosts are named, and this machine has {plural(count, 'slot')} then (-np).",
                args,
            )
        room = args.replacement.slots(sum(host.slots for host in hosts)) if args.replacement else count
        return fill(hosts, max(count, room))

    def hosts_for_agents(self) -> list[HostSlots]:
        """The hosts on which a launcher is to start agents, with as many slots as there are ranks; none where
        `args.supply` finds them. Raises what `hosts` does.
        """
        if self.args.host_discovery_script is None:
            found = [HostSlots(name, self.hosts.count(name)) for name in dict.fromkeys(self.hosts)]
        elif self.args.num_proc is not None:
            found = []
            self.check_elastic(self.args.num_proc, None)
        else:  # not even LSF says it then
            sentence = "-np is missing: say how many processes to start with, for example -np 2."
            raise ValueError(coded(LaunchCode.WRONG_COMMAND_LINE, sentence))
        self.check_stdin_elsewhere()
        return found

    def named_hosts(self) -> tuple[HostSlots, ...] | None:
        """The hosts that the command line or a batch system names; None when neither does."""
        args = self.args
        if args.hosts is not None:
            return parse_hosts(args.hosts)
        if args.hostfile is not None:
            return parse_hostfile(args.hostfile)
        if in_lsf_job(os.environ) and args.host_discovery_script is None and args.coordinator is None:
            return lsf_hosts(os.environ)
        return None

    def check_elastic(self, count: int, host_count: int | None) -> None:
        """Checks the options of elastic jobs, and sets `args.replacement`: how failed processes are replaced, and
        `args.supply`: what finds hosts.
        """
        args = self.args
        request = ElasticRequest(**{field: getattr(args, dest) for field, dest in _ELASTIC_DESTS.items()})
        request.check(count, host_count, _ELASTIC_FLAGS)
        args.replacement, args.supply = request.replacement(count), request.supply()
        if given := [_ELASTIC_FLAGS[field] for field in request.without_effect()]:
            remedy = "" if request.elastic else " --min-np or --host-discovery-script would make it elastic."
            reason = "no program finds its hosts" if request.elastic else "this job has a fixed size"
            say(f"{joined(given)} {'has' if len(given) == 1 else 'have'} no effect: {reason}.{remedy}")

    def check_stdin_elsewhere(self) -> None:
        """Checks stdin for a job whose ranks are started by agents."""
        if (refusal := standard_input.refusal_elsewhere(self.args.command)) is not None:
            raise RefusedError(refusal)
        if (sentence := standard_input.unread_elsewhere()) is not None:
            say(sentence)


class Stoppable(Protocol):
    """What Ctrl-C acts on: a job, here or on other hosts."""

    def stop(self, signum: int) -> None: ...


# Runs a job of `horovod.run` in a thread. The job gets what shows the output of ranks, and is to call the second
# argument, in its event loop, before the first process starts.
InThread = Callable[[Callable[["Console", Callable[[Stoppable], None]], None]], None]


@dataclass(frozen=True)
class AskedFunction:
    """A call of `horovod.run`, checked.

    call: function, arguments and keyword arguments. names: the host of every rank that there may be; of none if
    `supply` finds the hosts. processes: how many there are at first. python: the interpreter of the ranks; None: the
    one that runs now. replacement: of processes that fail; None: the job has a fixed size, and ends with the first.
    """

    call: tuple[Any, tuple[Any, ...], dict[str, Any]]
    names: Sequence[str]
    processes: int
    environ: Mapping[str, str]
    python: str | None = None
    verbose: bool = False
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    replacement: Replacement | None = None
    supply: Supply | None = None


def renamed(old: str, old_value: Any, new: str, new_value: Any) -> Any:
    """The value of an argument of a public function that calls this, which has an older name, too."""
    if old_value is None:
        return new_value
    warnings.warn(f"{old} is deprecated, use {new}.", DeprecationWarning, stacklevel=3)
    return old_value


def say(sentence: str, args: argparse.Namespace | None = None) -> None:
    """Writes a sentence on stderr. args: where they are known, they decide in which form."""
    row = ROWS["log_format"]
    given = vars(args).get(row.name) if args is not None else None
    text = line_of("error", "horovodrun", sentence) if (given or row.text(os.environ)) == "json" else None
    print(text or for_people(f"horovodrun: {sentence}"), file=sys.stderr, flush=True)


def in_words(error: OSError) -> str:
    """The error without its code and full stop. Errors of our own hold a sentence, those of system calls a number."""
    if error.strerror and error.strerror != os.strerror(error.errno or 0):
        return without_code(error.strerror).rstrip(".")
    return reason_of(error) if is_out_of_descriptors(error) else without_code(error).rstrip(".")
