"""Which task of a job becomes which rank, and what it means when its process has ended.

FixedSize: the job begins when all tasks are there, and ends with the first process that fails.

Elastic: each task that comes gets a process, and the coordinator forms worlds of those that there are. Spark runs tasks
that fail again, for as often as it is told (spark.task.maxFailures), on other executors if those of the first one are
lost; their processes join the others, which keep theirs. The number of a partition is the slot of its processes, and no
rank. Spark decides where a task runs again. What a failure means beside that, how long the next process is put off and
when it is enough, is decided as for every elastic job (core/elastic/decision.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from horovod.base.errors import LaunchCode, coded
from horovod.coordinator.core.cluster.hosts import START_S
from horovod.coordinator.core.elastic.decision import Exit, Observed, OnFailure, Phase, Rules, Slot, Target, decide
from horovod.coordinator.core.ranks import Place, Seat, assign
from horovod.spark.attending import Attempt, Policy
from horovod.spark.task.messages import Refused, Release, Start


class FixedSize(Policy):
    """Called in the coordinator's event loop, with the condition of its Tasks held."""

    keeps_failed = True  # else Spark would believe that a job has done its work whose processes have all failed

    def __init__(
        self,
        size: int,
        start: Callable[[Attempt, Place], Start],
        failed: Callable[[Attempt, int], object],
    ) -> None:
        """start: the order for a task. failed: called with each task that fails, and the rank that it had."""
        self.attempts: dict[int, Attempt] = {}  # by partition
        self.ranks: dict[int, int] = {}  # by partition, once all have come
        self.done: set[int] = set()  # the ranks whose processes have ended well
        self._size = size
        self._start = start
        self._failed = failed

    @property
    def has_begun(self) -> bool:
        return bool(self.ranks)

    @property
    def is_done(self) -> bool:
        return len(self.done) == self._size

    def came(self, attempt: Attempt) -> None:
        partition = attempt.came.partition
        if self.has_begun:  # a task was lost, and Spark runs it again
            sentence = "A task of this job was lost. Its other processes can't go on without it."
            attempt.orders.put_nowait(Refused(coded(LaunchCode.RANK_FAILED, sentence)))
            return
        self.attempts[partition] = attempt
        if len(self.attempts) == self._size:
            self._begin()

    def ended(self, attempt: Attempt) -> None:
        partition = attempt.came.partition
        if self.attempts.get(partition) is not attempt:
            return
        if not self.has_begun:  # Spark may run the task again, which is then another attempt
            del self.attempts[partition]
        elif attempt.has_failed:
            self._failed(attempt, self.ranks[partition])
        else:
            self.done.add(self.ranks[partition])

    def _begin(self) -> None:
        places = self.places(self.attempts)
        self.ranks = {partition: place.rank for partition, place in places.items()}
        for partition, place in places.items():
            attempt = self.attempts[partition]
            attempt.shown = place.rank
            attempt.orders.put_nowait(self._start(attempt, place))

    @staticmethod
    def places(attempts: Mapping[int, Attempt]) -> dict[int, Place]:
        """The places by partition: ranks are counted host by host, and in the order of partitions on each."""
        seats = [Seat(str(partition), attempts[partition].came.together) for partition in sorted(attempts)]
        found = assign(seats)
        assert not isinstance(found, str)  # nobody has asked for a rank
        return {int(place.member_id): place for place in found}


@dataclass(frozen=True)
class Failed:
    """How a process ended. how: completes "slot 1 on host a ". by_itself: with an exit code."""

    host: str
    how: str
    by_itself: bool


class Elastic(Policy):
    """Called in the coordinator's event loop, with the condition of its Tasks held."""

    def __init__(
        self,
        rules: Rules,
        start: Callable[[Attempt, Place], Start],
        failed: Callable[[Attempt, int], Failed],
        latest_epoch: Callable[[], int | None],
        tell: Callable[[str], None],
        later: Callable[[float, Callable[[], None]], object],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """start, failed: as of FixedSize. latest_epoch: of the job's world, as `Membership` has it. tell: shows a
        sentence. later: calls something in so many seconds.
        """
        self.has_failed_late = False
        self.verdict = ""  # why no further process is started, with a code
        self._is_done = False
        self._target = Target(rules, ())
        self._began_s: dict[int, float] = {}  # by slot
        self._put_off: dict[int, Attempt] = {}  # by slot: tasks whose processes are not started yet
        self._start = start
        self._failed = failed
        self._latest_epoch = latest_epoch
        self._tell = tell
        self._later = later
        self._now_s = now_s

    @property
    def is_done(self) -> bool:
        """One process has done the work of the job; the others are about to end."""
        return self._is_done

    @property
    def has_failed(self) -> bool:
        """The job can't go on: too many processes have failed, or one when others had ended well, whose result is
        missing and for which no other process is started.
        """
        return bool(self.verdict) or self.has_failed_late

    def is_over(self, running: int) -> bool:
        """No process runs any more. running: tasks that are there."""
        return self._is_done and not running

    def came(self, attempt: Attempt) -> None:
        slot = attempt.came.partition
        place = Place(str(slot), slot, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
        known = self._target.by_number.get(slot) or Slot(slot, attempt.came.host)

        def start() -> None:
            if self._is_done or attempt.lost:
                return
            self._put_off.pop(slot, None)
            attempt.shown = slot
            self._began_s[slot] = self._now_s()
            attempt.orders.put_nowait(self._start(attempt, place))

        put_off_s = 0.0 if known.retry_at_s is None else known.retry_at_s - self._now_s()
        self._have(replace(known, retry_at_s=None, incarnation=known.incarnation + 1))
        if put_off_s > 0:
            self._put_off[slot] = attempt
            self._later(put_off_s, start)
        else:
            start()

    def ended(self, attempt: Attempt) -> None:
        if not attempt.has_started:  # its task was lost, or released, while its process was put off
            self._put_off.pop(attempt.came.partition, None)
        elif attempt.has_failed:
            failed = self._failed(attempt, attempt.came.partition)
            if self._is_done:
                self.has_failed_late = True
            else:
                self._decide(attempt.came.partition, failed)
        else:
            self._is_done = True
            for one in self._put_off.values():
                one.orders.put_nowait(Release())

    def _have(self, slot: Slot) -> None:
        others = (one for one in self._target.slots if one.number != slot.number)
        slots = sorted((*others, slot), key=lambda one: one.number)
        self._target = replace(self._target, slots=tuple(slots))

    def _decide(self, number: int, failed: Failed) -> None:
        now_s, epoch = self._now_s(), self._latest_epoch()
        began_s = self._began_s.pop(number, None)
        early = began_s is not None and now_s - began_s < START_S
        slot = self._target.by_number[number]
        self._have(replace(slot, host=failed.host))
        ended = Exit(number, slot.incarnation, True, failed.how, early=early, by_itself=failed.by_itself)
        well = [one for one, since_s in self._began_s.items() if now_s - since_s >= START_S]
        # Processes of tasks that have not come yet may join.
        may_join = epoch is not None or len(self._target.slots) < self._target.rules.fewest
        observed = Observed([ended], well=well, joined=may_join, epoch=epoch or 0)
        self._target, sentence = decide(now_s, self._target, observed)
        if self._target.phase is Phase.ENDS:
            self.verdict = self.verdict or sentence
        else:
            self._tell(sentence)


def rules_of(fewest: int, most: int, limit: int, is_given: bool) -> Rules:
    """limit: how many processes may fail; is_given: in the job's life, as the user has said."""
    # Whether Spark finds room for a task again is Spark's business.
    return Rules(fewest, most, OnFailure.REPLACE, limit, math.inf, since_progress=not is_given)
