"""A job of a fixed size: it begins when all tasks are there, and ends with the first process that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from horovod.base.errors import LaunchCode, coded
from horovod.coordinator.core.ranks import Place, Seat, assign
from horovod.spark.attending import Attempt, Policy
from horovod.spark.task.messages import Refused, Start


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
        if not self.has_begun:  # Spark may run it again
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
        """By partition: ranks are counted host by host, and in the order of partitions on each."""
        seats = [Seat(str(partition), attempts[partition].came.together) for partition in sorted(attempts)]
        found = assign(seats)
        assert not isinstance(found, str)  # nobody has asked for a rank
        return {int(place.member_id): place for place in found}
