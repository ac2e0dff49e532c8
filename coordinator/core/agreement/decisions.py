"""The decisions that one message causes, collected by who gets them."""

from horovod.protos.v1 import negotiation_pb2 as pb

from .budget import Answers


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
