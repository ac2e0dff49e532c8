"""The latest errors of each rank of a world, for ranks whose stream broke before they heard of them."""

from collections import OrderedDict

from .budget import text_bytes
from .operations import Signature

MAX_FAILED = 1024  # errors kept for each rank
MAX_FAILED_BYTES = 4 << 20  # bytes of names and sentences kept for each rank

_Operation = tuple[int, str]  # process set, wire name
_Failure = tuple[Signature, str]  # what the error was about, and its sentence


class Failures:
    """Errors by rank and operation. When there are too many, the oldest are dropped, so no error is refused."""

    def __init__(self, max_count: int = MAX_FAILED, max_bytes: int = MAX_FAILED_BYTES) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._of: dict[int, OrderedDict[_Operation, _Failure]] = {}
        self._bytes: dict[int, int] = {}

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
