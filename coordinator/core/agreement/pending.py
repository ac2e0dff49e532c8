"""Operations of one process set that some ranks have announced and others have not."""

from collections.abc import Iterator, Mapping

from horovod.protos.v1 import types_pb2 as pb

from .blocked import Announced
from .budget import SHARED_BYTES, Budget, operation_bytes
from .operations import Signature


class PendingOperations(Mapping[str, Mapping[int, Announced]]):
    """By wire name and rank, the oldest announcement of a name first. Each is charged to its rank while it is here.

    Ranks that announce the same share one copy of it: the first has paid for it, each other pays for its own entry.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._by_name: dict[str, dict[int, Announced]] = {}

    def __getitem__(self, name: str) -> Mapping[int, Announced]:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def put(self, rank: int, op: pb.Operation, its_signature: Signature, now_s: float) -> None:
        """Adds an announcement, in place of the rank's earlier one under that name. Raises TooMuchError."""
        name = op.name
        announced = self._by_name.get(name, {})
        same = next(iter(announced.values()), None)
        if same is not None and same.signature != its_signature:
            same = next((one for one in announced.values() if one.signature == its_signature), None)
        if same is not None:
            new = Announced(same.op, same.signature, now_s, SHARED_BYTES)
        else:
            copy = pb.Operation()
            copy.CopyFrom(op)  # a part of a message would keep the whole message in memory
            new = Announced(copy, its_signature, now_s, operation_bytes(op))
        old = announced.get(rank)
        self._budget.charge(rank, new.bytes, f"operation {name[:200]!r}")
        if old is not None:
            self._budget.release(rank, old.bytes)
            del announced[rank]  # the rank is added again at the end, so that the oldest stays first
        announced[rank] = new
        self._by_name[name] = announced

    def pop(self, name: str) -> dict[int, Announced]:
        """Removes the operation and returns it by rank; empty when no rank has announced it."""
        announced = self._by_name.pop(name, {})
        for rank, one in announced.items():
            self._budget.release(rank, one.bytes)
        return announced

    def forget(self, rank: int, name: str) -> bool:
        """Drops what the rank has announced under that name; False when it has announced nothing."""
        announced = self._by_name.get(name, {})
        if (one := announced.pop(rank, None)) is None:
            return False
        self._budget.release(rank, one.bytes)
        if not announced:
            del self._by_name[name]
        return True

    def forget_rank(self, rank: int) -> None:
        for name in list(self._by_name):
            self.forget(rank, name)

    def clear(self) -> None:
        for name in list(self._by_name):
            self.pop(name)
