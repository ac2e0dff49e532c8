"""How much of the coordinator's memory one world may take, by bytes: for each member, and for all of them together.

Everything that the negotiation keeps because of what a member said is charged to that member before it is kept, until
it is dropped. What all ranks of a process set have agreed on stays charged to the one that said it
first, so that agreeing can't fail for want of bytes. The charges are upper estimates, measured on CPython 3.11
with protobuf 7: names count several times, and each tensor and dimension as much as it takes in a protobuf message.

No honest member comes near a limit: its operations are a few thousand of some hundred bytes.
"""

from horovod.base.errors import OperationCode, coded
from horovod.protos.v1 import negotiation_pb2, types_pb2

Answers = list[tuple[tuple[int, ...], negotiation_pb2.Decisions]]  # (ranks, the decisions that they are to be told)

MAX_MEMBER_BYTES = 64 << 20
MAX_WORLD_BYTES = 512 << 20

# Entries of one message: all of them are gone through at once, while no other member is served.
MAX_BLOCKED = 1024  # blocked operations of one message; blocked.py keeps only the latest MAX_REPORTS of them
_MOST = {
    "process_sets": 1 << 13,
    "recalled": 1 << 14,
    "blocked_report.unfinished": 1 << 12,
    "blocked_report.executed": 1 << 13,
    "blocked_report.unnamed": 1 << 10,
    "blocked_report.at": 1 << 14,
    "hello.known": 1 << 13,
    "hello.failed": 1 << 10,
}
_MOST_IDS = 1 << 18  # ids in all recalls and sets of ids of one message
_MOST_RANKS = 1 << 19  # ranks in all process sets of one message

_ENTRY_BYTES = 1024  # memory of an operation with its look-up tables, without names and tensors
_TENSOR_BYTES = 128
_DIMENSION_BYTES = 16
_CHARACTER_BYTES = 4  # bytes per character of a name; Latin script takes fewer
SHARED_BYTES = 256  # bytes for each further rank that announces the same operation


class TooMuchError(Exception):
    """A member exceeds a bound that no honest member reaches; its stream is to be ended with this sentence.

    answers: what ranks are to be told all the same, because its message had led to it before.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(coded(OperationCode.TOO_MANY, sentence))
        self.answers: Answers = []


def check_entries(rank: int, message: negotiation_pb2.NegotiationMessage) -> None:
    """Raises TooMuchError for a message with so many entries that all other members would wait while it is read.

    A limit of bytes is not enough: 8 MiB of the smallest entries took 20 s.
    """
    hello, report = message.hello, message.blocked_report
    counts = {
        "process_sets": len(message.process_sets),
        "recalled": len(message.recalled),
        "blocked_report.unfinished": len(report.unfinished),
        "blocked_report.executed": len(report.executed),
        "blocked_report.unnamed": len(report.unnamed),
        "blocked_report.at": len(report.at),
        "hello.known": len(hello.known),
        "hello.failed": len(hello.failed),
    }
    for what, count in counts.items():
        if count > _MOST[what]:
            raise TooMuchError(f"Rank {rank} sends {count} entries of {what}; the limit is {_MOST[what]}.")
    ids = sum(len(one.ids) for one in message.recalled) + sum(len(one.ids) + len(one.recalled) for one in hello.known)
    ranks = sum(len(one.ranks) for one in message.process_sets)
    for count, most, what in ((ids, _MOST_IDS, "ids"), (ranks, _MOST_RANKS, "ranks of process sets")):
        if count > most:
            raise TooMuchError(f"Rank {rank} sends {count} {what} in one message; the limit is {most}.")


def operation_bytes(op: types_pb2.Operation) -> int:
    """How many bytes a copy of `op` takes, with its entries in look-up tables."""
    dimensions = sum(len(tensor.shape) for tensor in op.tensors)
    return (
        _ENTRY_BYTES
        + 2 * op.ByteSize()  # fields that this version does not know are kept as well
        + _CHARACTER_BYTES * len(op.name)
        + _TENSOR_BYTES * len(op.tensors)
        + _DIMENSION_BYTES * dimensions
    )


def text_bytes(*texts: str) -> int:
    """How many bytes an entry with these texts takes."""
    return _ENTRY_BYTES + _CHARACTER_BYTES * sum(map(len, texts))


class Budget:
    """The bytes that are charged to the members of one world."""

    def __init__(self, epoch: int, member_limit: int = MAX_MEMBER_BYTES, world_limit: int = MAX_WORLD_BYTES) -> None:
        self._epoch = epoch
        self._member_limit = member_limit
        self._world_limit = world_limit
        self._of: dict[int, int] = {}  # by rank
        self._total = 0

    def of(self, rank: int) -> int:
        return self._of.get(rank, 0)

    @property
    def total(self) -> int:
        return self._total

    def charge(self, rank: int, count: int, what: str) -> None:
        """Charges for `what` ("operation 'x'") before it is kept. Raises TooMuchError, and then charges nothing."""
        held = self.of(rank)
        if held + count > self._member_limit:
            raise TooMuchError(
                f"The coordinator holds {held} bytes for rank {rank} in world {self._epoch}, and {count} more for "
                f"{what} would exceed its limit of {self._member_limit} bytes for one rank. Announce operations under "
                "names that come back in each step; other ranks must start them, too."
            )
        if self._total + count > self._world_limit:
            raise TooMuchError(
                f"The coordinator holds {self._total} bytes for world {self._epoch}, and {count} more for {what} of "
                f"rank {rank}, which has {held} of them, would exceed its limit of {self._world_limit} bytes for one "
                "world. Announce operations under names that come back in each step; other ranks must start them, too."
            )
        self.keep(rank, count)

    def keep(self, rank: int, count: int) -> None:
        """Charges for the rest of a larger entry, whose own charge has ended. So it can't exceed a limit."""
        self._of[rank] = self.of(rank) + count
        self._total += count

    def release(self, rank: int, count: int) -> None:
        held = self._of.get(rank, 0) - count
        if held:
            self._of[rank] = held
        else:
            self._of.pop(rank, None)
        self._total -= count
