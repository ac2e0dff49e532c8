"""What ranks are told: the decisions that one message causes, and errors that a rank may not have heard of."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Mapping

from horovod.base.words import printable
from horovod.protos.v1 import negotiation_pb2 as pb

from .budget import Answers, text_bytes
from .operations import Signature


class Batch:
    """Decisions for whole process sets and for single ranks; ranks with equal decisions share one message."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._by_ranks: dict[tuple[int, ...], pb.Decisions] = {}
        self._at_once = False

    def to(self, ranks: tuple[int, ...]) -> pb.Decisions:
        """What `ranks` are told, to be added to."""
        decisions = self._by_ranks.get(ranks)
        if decisions is None:
            decisions = self._by_ranks[ranks] = pb.Decisions(epoch=self._epoch)
        return decisions

    def at_once(self) -> None:
        """Each rank is to get all of its decisions in one message, so that it carries out none without the others."""
        self._at_once = True

    def answers(self) -> Answers:
        if not self._at_once or len(self._by_ranks) < 2:
            return list(self._by_ranks.items())
        of: dict[int, list[int]] = {}  # rank -> which of the decisions it gets
        parts = list(self._by_ranks.values())
        for place, ranks in enumerate(self._by_ranks):
            for rank in ranks:
                of.setdefault(rank, []).append(place)
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank, places in of.items():
            alike.setdefault(tuple(places), []).append(rank)
        answers: Answers = []
        for wanted, ranks_alike in alike.items():
            whole = pb.Decisions()
            for place in wanted:
                whole.MergeFrom(parts[place])
            answers.append((tuple(sorted(ranks_alike)), whole))
        return answers


# The latest errors of each rank of a world, for ranks whose stream broke before they heard of them.
#
# An error of an operation that ranks had announced is told again when a rank announces the operation again. A rank that
# waits under an id does not do that: such errors are told when its next stream begins.

MAX_FAILED = 1024  # errors kept for each rank
MAX_SENTENCE = 1 << 14  # characters of a sentence; some sentences name operations of many ranks
_COUNT_BITS = 24  # bits of an error's number that count errors; the bits above are the term
MAX_UNDER_IDS = 256  # errors of operations that ranks may have started under ids
MAX_FAILED_BYTES = 4 << 20  # bytes of names and sentences kept for each rank

_Operation = tuple[int, str]  # process set, wire name
_Failure = tuple[Signature, str]  # what the error was about, and its sentence


class Failures:
    """Errors by rank and operation. When there are too many, the oldest are dropped, so no error is refused."""

    def __init__(self, term: int = 0, max_count: int = MAX_FAILED, max_bytes: int = MAX_FAILED_BYTES) -> None:
        """term: of the coordinator that decides."""
        self._term = term
        self._count = 0  # number of the latest error of this term
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._of: dict[int, OrderedDict[_Operation, _Failure]] = {}
        self._bytes: dict[int, int] = {}
        self._under_ids: deque[tuple[Collection[int], pb.OperationError]] = deque(maxlen=MAX_UNDER_IDS)

    def told(
        self, ranks: Collection[int], error: pb.OperationError, signatures: Mapping[int, Signature]
    ) -> pb.OperationError:
        """The error with its number, as these ranks are told it. signatures: what some of them had announced."""
        error.sentence = printable(error.sentence, MAX_SENTENCE)  # it holds names of operations, with any characters
        self._count += 1
        error.number = (self._term << _COUNT_BITS) + self._count
        if error.under_id:
            self._under_ids.append((ranks, error))
        for rank, its_signature in signatures.items():
            self.put(rank, error.process_set, error.name, its_signature, error.sentence)
        return error

    def under_ids(self, rank: int, later_than: int) -> list[pb.OperationError]:
        """Those of which the rank has not heard. later_than: the number of the latest error that it has heard of."""
        return [error for ranks, error in self._under_ids if rank in ranks and error.number > later_than]

    def put(self, rank: int, process_set: int, name: str, its_signature: Signature, sentence: str) -> None:
        self.pop(rank, process_set, name)
        failed = self._of.setdefault(rank, OrderedDict())
        failed[process_set, name] = (its_signature, sentence)
        self._bytes[rank] = self.bytes_of(rank) + text_bytes(name, sentence)
        while failed and (len(failed) > self._max_count or self._bytes[rank] > self._max_bytes):
            self.pop(rank, *next(iter(failed)))

    def pop(self, rank: int, process_set: int, name: str) -> _Failure | None:
        failed = self._of.get(rank)
        found = failed.pop((process_set, name), None) if failed else None
        if found is not None:
            self._bytes[rank] -= text_bytes(name, found[1])
        return found

    def bytes_of(self, rank: int) -> int:
        return self._bytes.get(rank, 0)

    def forget_rank(self, rank: int) -> None:
        self._of.pop(rank, None)
        self._bytes.pop(rank, None)

    def forget_set(self, process_set: int) -> None:
        for rank, failed in self._of.items():
            for number, name in [key for key in failed if key[0] == process_set]:
                self.pop(rank, number, name)
