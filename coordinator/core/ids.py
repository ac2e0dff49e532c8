"""The small ids of one process set: which are live, which are being recalled, which are free.

    free --assign--> live --recall--> recalled --(every rank answered)--> free

An id must not get a new meaning while any rank may still use the old one; therefore the way back to free goes
through an answer of every rank.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice

from .operations import Signature

MAX_IDS = 1 << 14  # ids are below this on the data plane

Key = tuple[str, Signature]


class IdTable:
    def __init__(self, capacity: int = MAX_IDS) -> None:
        # Id 0 is never given out: a field that was not set can't be mistaken for an id.
        self._never_used = iter(range(1, capacity))
        self._free: list[int] = []  # used before
        self._recall_count = max(1, (capacity - 1) // 4)
        self._live: OrderedDict[int, Key] = OrderedDict()  # least recently assigned first
        self._id_of: dict[Key, int] = {}
        self._recalled: dict[int, set[int]] = {}  # id -> ranks that have not answered yet

    def live(self, key: Key) -> int | None:
        """The id that stands for exactly this content, if there is one."""
        return self._id_of.get(key)

    def assign(self, key: Key) -> int | None:
        """A new id for `key`, or None when all are taken."""
        new = self._free.pop() if self._free else next(self._never_used, None)
        if new is None:
            return None
        self._live[new] = key
        self._id_of[key] = new
        return new

    def recall(self, ranks: Iterable[int]) -> list[int]:
        """Starts to recall a quarter of the table; nothing while an earlier recall is under way."""
        if self._recalled:
            return []
        return self._recall(list(islice(self._live, self._recall_count)), ranks)

    def recall_all(self, ranks: Iterable[int], which: Callable[[Key], bool]) -> list[int]:
        """Starts to recall the ids of all keys for which `which` holds."""
        return self._recall([one for one, key in self._live.items() if which(key)], ranks)

    def _recall(self, ids: list[int], ranks: Iterable[int]) -> list[int]:
        waiting_for = set(ranks)
        for one in ids:
            del self._id_of[self._live.pop(one)]
            self._recalled[one] = set(waiting_for)
        return ids

    def outstanding(self, rank: int) -> list[int]:
        """Recalled ids for which `rank` still owes its answer."""
        return [one for one, ranks in self._recalled.items() if rank in ranks]

    def answered(self, rank: int, ids: Iterable[int]) -> None:
        """`rank` no longer uses these ids. Ids that were not recalled are ignored."""
        for one in ids:
            waiting_for = self._recalled.get(one)
            if waiting_for is None:
                continue
            waiting_for.discard(rank)
            if not waiting_for:
                del self._recalled[one]
                self._free.append(one)
