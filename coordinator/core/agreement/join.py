"""hvd.join(): ranks that have run out of data wait for the others, and contribute zeros to their allreduces meanwhile.

A round goes through three phases, each told to all ranks of the world:

    open    some have joined. A rank joins when nothing that it started itself and waits for is in flight, and then
            contributes zeros to every allreduce it knows of, ahead of the others; so what the others do needs no word
            from here.
    ending  all have joined, so no rank starts anything, and the zeros that still wait are withdrawn. The last rank
            never contributed any: otherwise the zeros of all ranks would meet, and reduce zeros for ever.
    over    all have withdrawn their zeros. Only now may ranks go on, because zeros that are left would be taken for
            arrivals of the next operations.

Which phase comes next follows from what the ranks say, and saying something again changes nothing.
"""

from collections.abc import Collection

from horovod.base.errors import OperationCode, coded
from horovod.base.words import capitalized, ranks_in_words
from horovod.protos.v1 import negotiation_pb2 as pb
from horovod.protos.v1 import types_pb2

from .operations import type_name
from .process_set import ProcessSet

ALLOWED = frozenset({types_pb2.OPERATION_TYPE_ALLREDUCE})


class Joining:
    """The rounds of hvd.join() in one world."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._round = 0
        self._last_over: pb.JoinState | None = None
        self._clear()

    def _clear(self) -> None:
        self.ranks: dict[int, None] = {}  # ranks that have joined, in order
        self._without_zeros: set[int] = set()

    def receive(self, rank: int, message: pb.Join) -> pb.JoinState | None:
        """What `rank` says. Returns the state that all ranks are to be told, if it is a new one."""
        if message.round != self._round:
            return None  # `missed` answers a rank that is behind
        before = self.state()
        self.ranks[rank] = None
        if message.contributes_none:
            self._without_zeros.add(rank)
        after = self.state()
        if after.phase == pb.JOIN_PHASE_OVER:
            self._round += 1
            self._last_over = after
            self._clear()
        return after if after != before else None

    def restore(self, rounds_over: int, last_joined: int) -> None:
        """Begins with the state of another coordinator, at which so many rounds were over."""
        self._round = rounds_over
        if rounds_over:
            self._last_over = pb.JoinState(round=rounds_over - 1, ranks=[last_joined], phase=pb.JOIN_PHASE_OVER)

    def joined(self, process_set: ProcessSet) -> Collection[int]:
        """Ranks that contribute zeros to the allreduces of `process_set`."""
        return self.ranks.keys() if process_set.number == 0 else ()

    def working(self, process_set: ProcessSet) -> tuple[int, ...]:
        """The members of the set that have not joined, so start operations themselves."""
        joined = self.joined(process_set)
        return tuple(rank for rank in process_set.ranks if rank not in joined) if joined else process_set.ranks

    @property
    def last_over(self) -> pb.JoinState | None:
        return self._last_over

    def missed(self, round_of_rank: int | None) -> pb.JoinState | None:
        """What a rank is to be told that lost its stream: in `round_of_rank` it waits, None if it has not joined."""
        if round_of_rank is not None and round_of_rank < self._round:
            return self._last_over
        return self.state() if self.ranks else None

    def state(self) -> pb.JoinState:
        phase = pb.JOIN_PHASE_OPEN
        if len(self.ranks) == self._size:
            phase = pb.JOIN_PHASE_OVER if len(self._without_zeros) == self._size else pb.JOIN_PHASE_ENDING
        return pb.JoinState(round=self._round, ranks=self.ranks, phase=phase, sentence=self._sentence())

    def _sentence(self) -> str:
        verb = "has" if len(self.ranks) == 1 else "have"
        return (
            f"{capitalized(ranks_in_words(self.ranks))} {verb} called hvd.join(), so until all ranks have joined only "
            "allreduce runs in the global process set (for sparse gradients: "
            "DistributedOptimizer(sparse_as_dense=True))."
        )

    def refusal(self, op: types_pb2.Operation) -> str:
        """Why `op` can't run in the global process set now, or ""; the engine says it of what never comes here."""
        if op.type in ALLOWED or not self.ranks:
            return ""
        stem = f"{type_name(op).capitalize()} is not supported with Join at this time."
        return coded(OperationCode.NOT_WITH_JOIN, f"{stem} {self._sentence()} It was {op.name}.")
