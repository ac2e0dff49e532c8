"""The target of a job: the slots that are to have a process, on which host, and which process of each is meant.

A slot has a number, which it keeps for as long as the job lives, also on another host. The generation rises with each
change of the target, so that of two targets the later one is known. The incarnation of a slot is the generation in
which its process was asked for: another process of the slot has a greater one, and what is heard of an earlier process
changes nothing any more.

The scheduler writes the target, as `decide` says, into the record of the job; agents start what it names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class OnFailure(Enum):
    """What a failed process means for the job."""

    END = "end"  # all others end as well
    REPLACE = "replace"  # another process takes its slot


class Phase(Enum):
    RUNS = "runs"
    FINISHES = "finishes"  # a process has ended well: those that run may end, and none is started any more
    ENDS = "ends"  # no process is to run


@dataclass(frozen=True)
class Rules:
    """What a person said of the job. fewest, most: numbers of slots."""

    fewest: int
    most: int
    on_failure: OnFailure = OnFailure.END
    most_replacements: int | None = None  # replacements in the job's whole life; None: no limit
    patience_s: float = 0.0  # for how long there may be fewer than `fewest` slots
    # Only those replacements count since the job has last gone on, and they end it only if too few processes are left
    # that have not failed.
    since_progress: bool = False
    host_goes: bool = False  # a host on which a process fails by itself is not used any more, so its other slots go too


@dataclass(frozen=True)
class Slot:
    number: int
    host: str
    incarnation: int = 1
    is_leaving: bool = False  # its process was asked to end, and the slot is given up with it
    failures: int = 0  # processes of it that failed soon after their start, in a row
    retry_at_s: float | None = None  # its process has failed, and the next one is started at this time


@dataclass(frozen=True)
class Target:
    rules: Rules
    slots: tuple[Slot, ...]  # by number
    generation: int = 1
    phase: Phase = Phase.RUNS
    replacements: int = 0  # so far
    setbacks: int = 0  # processes that have failed since the job has last gone on
    progress_epoch: int = 0  # the job's latest world when it last went on
    short_since_s: float | None = None  # since when there are fewer slots than `rules.fewest`, without leaving ones

    @cached_property
    def staying(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if not slot.is_leaving)

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to start a process that was put off."""
        return any(slot.retry_at_s is not None and now_s >= slot.retry_at_s for slot in self.slots)

    @property
    def is_short(self) -> bool:
        return len(self.staying) < self.rules.fewest

    @cached_property
    def by_number(self) -> Mapping[int, Slot]:
        return {slot.number: slot for slot in self.slots}
