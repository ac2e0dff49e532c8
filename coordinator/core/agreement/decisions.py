"""The decisions that one message causes, collected by who gets them."""

from horovod.protos.v1 import negotiation_pb2 as pb

from .budget import Answers


class Batch:
    """Decisions for whole process sets and for single ranks; ranks with equal decisions share one message."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._by_ranks: dict[tuple[int, ...], pb.Decisions] = {}

    def to(self, ranks: tuple[int, ...]) -> pb.Decisions:
        """What `ranks` are told, to be added to."""
        decisions = self._by_ranks.get(ranks)
        if decisions is None:
            decisions = self._by_ranks[ranks] = pb.Decisions(epoch=self._epoch)
        return decisions

    def answers(self) -> Answers:
        return list(self._by_ranks.items())
