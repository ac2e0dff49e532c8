"""An elastic job: each task that comes gets a process, and the coordinator forms worlds of those that there are.

Spark runs tasks that fail again, for as often as it is told (spark.task.maxFailures), on other executors where those of
the first one are lost; their processes join the others, which keep theirs. The number of a partition is the slot of its
processes, and no rank.
"""

from __future__ import annotations

from collections.abc import Callable

from horovod.coordinator.core.elastic.decision import RESET_LIMIT_EXCEEDED_MESSAGE
from horovod.coordinator.core.ranks import Place
from horovod.spark.attending import Attempt, Policy
from horovod.spark.task.messages import Start


class Elastic(Policy):
    """Called in the coordinator's event loop, with the condition of its Tasks held."""

    def __init__(
        self,
        fewest: int,
        reset_limit: int | None,
        start: Callable[[Attempt, Place], Start],
        failed: Callable[[Attempt, int], None],
    ) -> None:
        """As FixedSize. reset_limit: how many processes may fail; None: any number."""
        self.resets = 0
        self.has_failed_late = False
        self._is_done = False
        self._fewest = fewest
        self._limit = reset_limit
        self._start = start
        self._failed = failed

    @property
    def is_done(self) -> bool:
        """One process has done the work of the job; the others are about to end."""
        return self._is_done

    @property
    def exceeds_limit(self) -> bool:
        return self._limit is not None and self.resets > self._limit

    def limit_sentence(self) -> str:
        """Programs look for it."""
        return f"{RESET_LIMIT_EXCEEDED_MESSAGE.format(self._limit)}."

    @property
    def has_failed(self) -> bool:
        """The job can't go on: too many processes have failed, or one when others had ended well, whose result is
        missing and for which no other process is started.
        """
        return self.exceeds_limit or self.has_failed_late

    def is_over(self, running: int) -> bool:
        """No process runs any more. running: tasks that are there."""
        return self._is_done and not running

    def came(self, attempt: Attempt) -> None:
        slot = attempt.shown = attempt.came.partition
        place = Place(str(slot), slot, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
        attempt.orders.put_nowait(self._start(attempt, place))

    def ended(self, attempt: Attempt) -> None:
        if attempt.has_failed:
            self._failed(attempt, attempt.came.partition)
            if self._is_done:
                self.has_failed_late = True
            else:
                self.resets += 1
        else:
            self._is_done = True
