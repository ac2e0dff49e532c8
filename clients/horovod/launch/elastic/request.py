"""What is asked of an elastic job, by options of horovodrun or arguments of horovod.run: checked here for both.

The scheduler is told it as a policy in the job's description, its processes by variables.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from horovod.base.errors import LaunchCode, SettingCode, coded
from horovod.base.settings import resolve, variables
from horovod.launch.elastic.discovery import HostDiscovery, HostDiscoveryScript, command_of

if TYPE_CHECKING:
    from horovod.protos.v1 import jobs_pb2

_COOLDOWN_LIMIT_S = 3600
# The default. A program that fails at its start would otherwise be started without end.
REPLACEMENTS_PER_PROCESS = 3


@dataclass(frozen=True)
class Replacement:
    """Processes that fail are replaced.

    most: so often in the job's life; with since_progress, since it has last gone on; None: no limit. sizes: the fewest
    and the most processes, which may be equal. The most may be None, which is no limit. cooldown_s: for how long a host
    that was lost gets none of them, at least and at most; None: for the rest of the job's life. spares: further
    processes, that wait until one of a world of the most is lost. supplied: the launcher finds the hosts, and a host on
    which a process fails is given up with all of its processes.
    """

    most: int | None
    sizes: tuple[int, int | None]
    cooldown_s: tuple[float, float] | None = None
    supplied: bool = False
    spares: int = 0
    since_progress: bool = False

    @property
    def most_slots(self) -> int | None:
        """How many processes there may be in all; None: no limit."""
        most = self.sizes[1]
        return None if most is None else most + self.spares

    def greatest(self, processes: int) -> int:
        """How many processes such a job has at most, as far as that is limited, or else begins with."""
        return max(processes, self.most_slots or 0)

    def slots(self, room: int) -> int:
        """How many of `room` slots a job may use."""
        return room if self.most_slots is None else min(room, self.most_slots)


@dataclass(frozen=True)
class Supply:
    """Where the hosts of a job come from.

    cooldown_range: the least and the most seconds after which a host that failed is used again; None: never.
    reset_limit: how often hosts may come, go or fail; None: no limit.
    """

    source: HostDiscovery
    cooldown_range: Sequence[int] | None = None
    reset_limit: int | None = None


@dataclass(frozen=True)
class ElasticRequest:
    """None means not given. `min_num_proc` or something that finds hosts makes a job elastic."""

    min_num_proc: int | None = None
    max_num_proc: int | None = None
    slots: int | None = None  # slots of a host that the script prints without a number
    reset_limit: int | None = None
    cooldown_range: Sequence[int] | None = None  # seconds
    host_discovery_script: str | None = None
    host_discovery: HostDiscovery | None = None
    spares: int | None = None

    @property
    def elastic(self) -> bool:
        """Whether this makes a job elastic."""
        return self.min_num_proc is not None or self.finds_hosts

    @property
    def finds_hosts(self) -> bool:
        """Whether the hosts of the job come and go as something says."""
        return self.host_discovery_script is not None or self.host_discovery is not None

    def supply(self) -> Supply | None:
        """What finds the hosts; None where nothing does. Call `check` before."""
        source = self.host_discovery
        if self.host_discovery_script is not None:
            source = HostDiscoveryScript(self.host_discovery_script, self.slots)
        return Supply(source, self.cooldown_range, self.reset_limit) if source is not None else None

    def replacement(self, num_proc: int) -> Replacement | None:
        """How failed processes are replaced; None: the first failed process ends the job. Call `check` before."""
        if not self.elastic:
            return None
        fewest = max(1, num_proc if self.min_num_proc is None else self.min_num_proc)
        spares, greatest = self.spares or 0, self.max_num_proc
        if spares and greatest is None:  # otherwise each spare process would get a place in the world
            greatest = num_proc
        if self.finds_hosts:
            return Replacement(None, (fewest, greatest), supplied=True, spares=spares)
        most = REPLACEMENTS_PER_PROCESS * num_proc if self.reset_limit is None else self.reset_limit
        if greatest is None and fewest == num_proc:
            greatest = num_proc  # `-np 4 --min-np 4` asks for replacements, and not for more than 4
        cooldown_s = None if self.cooldown_range is None else (self.cooldown_range[0], self.cooldown_range[1])
        return Replacement(most, (fewest, greatest), cooldown_s, spares=spares, since_progress=self.reset_limit is None)

    def without_effect(self) -> list[str]:
        """The fields that were given and change nothing in such a job."""
        if not self.elastic:
            return self.given()
        return ["slots"] if not self.finds_hosts and self.slots is not None else []

    def given(self) -> list[str]:
        """The fields that were given, those that make a job elastic first."""
        names = ["min_num_proc", "host_discovery_script", "host_discovery", *(field.name for field in fields(self))]
        return [name for name in dict.fromkeys(names) if getattr(self, name) is not None]

    def check(self, num_proc: int, host_count: int | None, names: dict[str, str]) -> None:
        """ValueError in words for what can't be. host_count: hosts that are given in a list, None without one;
        names: how the user calls a field."""
        for field in ("min_num_proc", "max_num_proc", "slots", "reset_limit", "spares"):
            value = getattr(self, field)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                sentence = f"{names[field]} must be >= 0, not {value!r}."
                raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
            if value is not None and value >= 1 << 32:
                sentence = f"{names[field]} must be below 2 ** 32, not {value}."
                raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
        self._check_cooldown(names["cooldown_range"])
        self._check_source(names)
        if not self.elastic:
            return
        if self.min_num_proc is not None and self.min_num_proc > num_proc:
            sentence = (
                f"{names['min_num_proc']} must be at most {names['num_proc']}, {num_proc}, not {self.min_num_proc}."
            )
            raise ValueError(coded(LaunchCode.CONFLICTING_OPTIONS, sentence))
        if self.max_num_proc is not None and self.max_num_proc < num_proc:
            sentence = (
                f"{names['max_num_proc']} must be at least {names['num_proc']}, {num_proc}, not {self.max_num_proc}."
            )
            raise ValueError(coded(LaunchCode.CONFLICTING_OPTIONS, sentence))
        sizes = {num_proc, self.min_num_proc or num_proc, self.max_num_proc or num_proc}
        is_fixed = not self.finds_hosts and len(sizes) == 1
        if host_count is not None and host_count < 2 and not is_fixed:
            sentence = (
                f"An elastic job on a fixed list of hosts needs at least 2 hosts, but {host_count} is given. "
                f"Name more, or find hosts with a program ({names['host_discovery_script']})."
            )
            raise ValueError(coded(LaunchCode.CONFLICTING_OPTIONS, sentence))

    def _check_cooldown(self, name: str) -> None:
        given = self.cooldown_range
        if given is None:
            return
        if len(given) != 2 or not 1 <= given[0] <= given[1] <= _COOLDOWN_LIMIT_S:
            sentence = (
                f"{name} must be two numbers of seconds from 1 to {_COOLDOWN_LIMIT_S}, the smaller one first, not "
                f"{' '.join(map(str, given))}."
            )
            raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))

    def _check_source(self, names: dict[str, str]) -> None:
        script, source = self.host_discovery_script, self.host_discovery
        if script is not None and source is not None:
            sentence = f"{names['host_discovery_script']} and {names['host_discovery']} exclude each other: give one."
            raise ValueError(coded(LaunchCode.CONFLICTING_OPTIONS, sentence))
        if source is not None and not callable(getattr(source, "find_available_hosts_and_slots", None)):
            sentence = (
                f"{names['host_discovery']} must have a method find_available_hosts_and_slots(), as a HostDiscovery "
                f"has, and {type(source).__name__} has none."
            )
            raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
        if script is None:
            return
        try:
            program = command_of(script)[0]
        except ValueError as error:  # quotes that do not match
            sentence = f"{names['host_discovery_script']} is {script!r}, which is no command: {error}."
            raise ValueError(coded(SettingCode.INVALID_SETTING, sentence)) from None
        if shutil.which(program) is None:
            reason = "is not executable (chmod +x)" if os.path.exists(program) else "does not exist"
            if os.path.isdir(program):
                reason = "is a folder"
            name = names["host_discovery_script"]
            sentence = f"{name} names {program!r}, which {reason}: expected a program that prints host:slots."
            raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))


def write_policy(spec: jobs_pb2.JobSpec, replacement: Replacement | None, environ: Mapping[str, str]) -> None:
    """Writes it into the job, of which `environ` is. replacement: None where it ends with its first failed process.

    What a setting says of the job has the name of the field, behind `elastic_` (docs/adr/0119-rules-by-name.md).
    """
    if replacement is None:
        return
    policy = spec.policy
    policy.replaces_failed = True
    policy.supplied_hosts = replacement.supplied
    if replacement.most is not None:
        policy.most_replacements, policy.since_progress = replacement.most, replacement.since_progress
    policy.fewest, policy.most = replacement.sizes[0], replacement.most_slots or 0
    policy.spares = replacement.spares
    policy.cooldown_least_seconds, policy.cooldown_most_seconds = replacement.cooldown_s or (0, 0)
    settings = resolve(environ)
    policy.patience_seconds = settings.elastic_timeout_seconds
    for name in policy.DESCRIPTOR.fields_by_name:
        if (value := getattr(settings, f"elastic_{name}", None)) is not None:
            setattr(policy, name, value)


def elastic_variables(replacement: Replacement | None) -> dict[str, str]:
    """Of each process: how many members its worlds may have."""
    if replacement is None:
        return {}
    fewest, most = replacement.sizes
    return variables(elastic=True, min_size=fewest, **({} if most is None else {"max_size": most}))
