"""What is asked of an elastic job, by options of horovodrun or arguments of horovod.run: checked here for both."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields

from horovod.base.errors import LaunchCode, SettingCode, coded

_COOLDOWN_LIMIT_S = 3600
# By default. A program that fails at its start would else be started without end.
REPLACEMENTS_PER_PROCESS = 3
NOT_YET = (
    "Hosts can't be found by a program yet, so {given} can't be used: name all of them, and give {min_num_proc} and "
    "{max_num_proc} for a job that goes on without those that are lost."
)


@dataclass(frozen=True)
class Replacement:
    """Processes that fail are replaced.

    most: so often in the job's life. sizes: the fewest and the most processes of a job whose size may change; None: it
    does not. The most may be None, which is no limit. cooldown_s: for how long a host that was lost gets none of them,
    at least and at most; None: for the rest of the job's life.
    """

    most: int
    sizes: tuple[int, int | None] | None = None
    cooldown_s: tuple[float, float] | None = None

    def greatest(self, processes: int) -> int:
        """How many processes such a job has at most, as far as that is limited, or else begins with."""
        return max(processes, self.sizes[1] or 0) if self.sizes is not None else processes

    def slots(self, processes: int, room: int) -> int:
        """How many of `room` slots a job may use that begins with so many processes."""
        if self.sizes is None:
            return processes
        return room if self.sizes[1] is None else min(room, self.sizes[1])


@dataclass(frozen=True)
class ElasticRequest:
    """None means not given. `min_num_proc` or `host_discovery_script` makes a job elastic."""

    min_num_proc: int | None = None
    max_num_proc: int | None = None
    slots: int | None = None  # slots of a host that the script prints without a number
    reset_limit: int | None = None
    cooldown_range: Sequence[int] | None = None  # seconds
    host_discovery_script: str | None = None

    @property
    def elastic(self) -> bool:
        """Whether this makes a job elastic."""
        return self.min_num_proc is not None or self.host_discovery_script is not None

    def replacement(self, num_proc: int, names: dict[str, str]) -> Replacement | None:
        """How failed processes are replaced; None: the first failed process ends the job.

        Call `check` before. Raises NotImplementedError for a script that finds hosts.
        """
        if not self.elastic:
            return None
        if self.host_discovery_script is not None:
            raise NotImplementedError(NOT_YET.format(given=names["host_discovery_script"], **names))
        most = REPLACEMENTS_PER_PROCESS * num_proc if self.reset_limit is None else self.reset_limit
        fewest = max(1, num_proc if self.min_num_proc is None else self.min_num_proc)
        is_fixed = fewest == num_proc and self.max_num_proc in (None, num_proc)
        if is_fixed:
            return Replacement(most)
        cooldown_s = None if self.cooldown_range is None else (self.cooldown_range[0], self.cooldown_range[1])
        return Replacement(most, (fewest, self.max_num_proc), cooldown_s)

    def without_effect(self, replacement: Replacement | None) -> list[str]:
        """The fields that were given and change nothing in such a job."""
        if not self.elastic:
            return self.given()
        names = ["slots"] if replacement is not None and replacement.sizes is not None else ["slots", "cooldown_range"]
        return [name for name in names if getattr(self, name) is not None]

    def given(self) -> list[str]:
        """The fields that were given, those that make a job elastic first."""
        names = ["min_num_proc", "host_discovery_script", *(field.name for field in fields(self))]
        return [name for name in dict.fromkeys(names) if getattr(self, name) is not None]

    def check(self, num_proc: int, host_count: int | None, names: dict[str, str]) -> None:
        """ValueError in words for what can't be. host_count: hosts that are given in a list, None without one;
        names: how the user calls a field."""
        for field in ("min_num_proc", "max_num_proc", "slots", "reset_limit"):
            value = getattr(self, field)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                sentence = f"{names[field]} must be >= 0, not {value!r}."
                raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
            if value is not None and value >= 1 << 32:
                sentence = f"{names[field]} must be below 2 ** 32, not {value}."
                raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
        self._check_cooldown(names["cooldown_range"])
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
        is_fixed = self.host_discovery_script is None and len(sizes) == 1
        if host_count is not None and host_count < 2 and not is_fixed:
            sentence = (
                f"An elastic job on a fixed list of hosts needs at least 2 of them, and {host_count} is given: name "
                f"more, or let a program name them ({names['host_discovery_script']})."
            )
            raise ValueError(coded(LaunchCode.CONFLICTING_OPTIONS, sentence))
        self._check_script(names["host_discovery_script"])

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

    def _check_script(self, name: str) -> None:
        script = self.host_discovery_script
        if script is not None and shutil.which(script) is None:
            reason = "is not executable (chmod +x)" if os.path.exists(script) else "does not exist"
            sentence = f"{name} names {script!r}, which {reason}: expected a program that prints host:slots."
            raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
