"""What a rank remembers of its coordinator's decisions, to tell another coordinator that takes over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from horovod.protos.v1 import negotiation_pb2

MAX_FAILED = 32  # errors that a hello holds, the latest ones
MAX_FAILED_BYTES = 64 << 10  # bytes of the sentences of these errors


class Known:
    """Guarded by its owner's lock."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # Process set -> the ids that may be used, each with whether it was recalled.
        self._ids: dict[int, dict[int, bool]] = {}
        self._rounds_over = 0  # of hvd.join()
        self._last_joined = 0
        self._place: int | None = None  # place of this rank among the ranks that have joined
        self._failed: OrderedDict[int, negotiation_pb2.OperationError] = OrderedDict()  # by number

    def heard(self, decisions: negotiation_pb2.Decisions) -> None:
        for plan in decisions.plans:
            self._ids.setdefault(plan.process_set, {})[plan.id] = False
        for recall in decisions.recalls:
            ids = self._ids.get(recall.process_set, {})
            ids.update((one, True) for one in recall.ids if one in ids)
        for error in decisions.errors:
            if error.number:
                self._failed[error.number] = error
        size = sum(len(error.sentence) for error in self._failed.values())
        while len(self._failed) > MAX_FAILED or size > MAX_FAILED_BYTES:
            size -= len(self._failed.popitem(last=False)[1].sentence)
        for join in decisions.joins:
            if join.round != self._rounds_over or not join.ranks:
                continue  # told again
            if join.phase == negotiation_pb2.JOIN_PHASE_OVER:
                self._rounds_over, self._last_joined, self._place = self._rounds_over + 1, join.ranks[-1], None
            elif self._rank in join.ranks:
                self._place = list(join.ranks).index(self._rank)

    def freed(self, process_set: int, ids: Iterable[int]) -> None:
        """The engine has answered a recall."""
        for one in ids:
            self._ids.get(process_set, {}).pop(one, None)

    def forget_set(self, process_set: int) -> None:
        self._ids.pop(process_set, None)

    def hello(self, who: negotiation_pb2.Hello) -> negotiation_pb2.Hello:
        return negotiation_pb2.Hello(
            job=who.job,
            member_id=who.member_id,
            rank=who.rank,
            known=[
                negotiation_pb2.KnownIds(
                    process_set=number, ids=ids, recalled=[one for one, recalled in ids.items() if recalled]
                )
                for number, ids in self._ids.items()
                if ids
            ],
            rounds_over=self._rounds_over,
            last_joined=self._last_joined,
            failed=self._failed.values(),
        )

    def place(self, join: negotiation_pb2.Join) -> None:
        if self._place is not None:
            join.place = self._place
