"""The small ids of one process set: which are live, which are being recalled, which are free.

    free --assign--> live --recall--> recalled --(every rank answered)--> free

An id must not get a new meaning while any rank may still use the old one; therefore the way back to free goes
through an answer of every rank.

Every id takes memory on each rank for as long as it is live, a few kilobytes, and names that never repeat
("loss.1", "loss.2", ...) would take all ids. So the table has a usual size. When it is exceeded, a quarter of that,
the least recently assigned, is recalled. Which of the ids are in use is not known here, since operations run under them
without the coordinator; but one that is in use is announced again. If most of what is assigned then had been recalled
before, the program has that many operations, and the usual size is doubled, up to the number of ids. So names that do
not repeat take no more than the usual size, or four times as much as those that do.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Set
from itertools import islice

from .budget import Budget, text_bytes
from .operations import Signature, is_unnamed, without_optimizer

MAX_IDS = 1 << 14  # ids are below this on the data plane
USUAL_IDS = 1 << 12  # live ids before any is recalled; as many tensors as a large model has
SHOWN_NAMES = 3  # names in a message, of those that do not repeat

Key = tuple[str, Signature]


def unknown_key(one: int) -> Key:
    """A key for an id that an earlier coordinator gave to some operation. No operation has an empty name."""
    return "", (one,)


def is_unknown(key: Key) -> bool:
    return not key[0]


def key_bytes(key: Key) -> int:
    return text_bytes(key[0])


class IdTable:
    def __init__(self, capacity: int = MAX_IDS, budget: Budget | None = None, usual: int = USUAL_IDS) -> None:
        """usual: how many ids are live before some are recalled although others are free."""
        self._budget = budget
        self._capacity = capacity
        self._usual = usual
        self._given_up: OrderedDict[int, None] = OrderedDict()  # hashes of keys recalled as the table was too large
        # Ids assigned since the last such recall, and how many of them went to names that had been given up.
        self._assigned = self._came_back = 0
        self._pattern: list[str] = []  # names given up last that differ in their numbers only, if most of them do
        self.unrepeated: list[str] = []  # names that did not repeat, to be told to the user once; then cleared
        self._told = False
        # Id 0 is never given out: a field that was not set can't be mistaken for an id.
        self._never_used = iter(range(1, capacity))
        self._free: list[int] = []  # ids that were in use before
        self._adopted: set[int] = set()  # live ids that an earlier coordinator gave
        self._recall_count = max(1, (capacity - 1) // 4)
        self._live: OrderedDict[int, Key] = OrderedDict()  # least recently assigned first
        self._payer: dict[int, int] = {}  # the rank to which a live id is charged
        self._id_of: dict[Key, int] = {}
        self._recalled: dict[int, set[int]] = {}  # id -> ranks that have not answered yet

    def live(self, key: Key) -> int | None:
        """The id that stands for exactly this content, if there is one."""
        return self._id_of.get(key)

    def assign(self, key: Key, payer: int = 0) -> int | None:
        """A new id for `key`, or None when all are taken. It is charged to the rank `payer`."""
        if not self._free:
            fresh = next((one for one in self._never_used if one not in self._adopted), None)
            self._free += [] if fresh is None else [fresh]
        if not self._free:
            return None
        if self._budget is not None:
            self._budget.keep(payer, key_bytes(key))
        self._assigned += 1
        if hash(key) in self._given_up:
            del self._given_up[hash(key)]
            self._came_back += 1
        new = self._free.pop()
        self._live[new] = key
        self._payer[new] = payer
        self._id_of[key] = new
        return new

    def adopt(self, one: int) -> None:
        """An id that an earlier coordinator gave is live. What it stands for is known to all ranks, but not here."""
        self._adopted.add(one)
        key = unknown_key(one)
        if self._budget is not None:
            self._budget.keep(0, key_bytes(key))
        self._live[one] = key
        self._payer[one] = 0
        self._id_of[key] = one

    def adopt_recalled(self, one: int, ranks: Iterable[int]) -> None:
        """An earlier coordinator's id is being recalled and `ranks` have not answered; without any, it is free."""
        self._adopted.add(one)
        self._recalled[one] = set(ranks)

    def recall(self, ranks: Iterable[int]) -> list[int]:
        """Starts to recall a quarter of the table; nothing while an earlier recall is under way."""
        if self._recalled:
            return []
        return self._recall(list(islice(self._live, self._recall_count)), ranks)

    def recall_unrepeated(self, ranks: Iterable[int]) -> list[int]:
        """Starts to recall the ids that were assigned longest ago if more than the usual number are live, and nothing
        while an earlier recall is under way."""
        if len(self._live) <= self._usual or self._recalled:
            return []
        came_back, self._assigned, self._came_back = 2 * self._came_back > self._assigned, 0, 0
        if came_back:
            self._usual, self._pattern = min(2 * self._usual, self._capacity), []
        if len(self._live) <= self._usual:
            return []
        ids = list(islice(self._live, max(1, self._usual // 4)))
        keys = [self._live[one] for one in ids]
        self._given_up.update((hash(key), None) for key in keys)
        while len(self._given_up) > self._capacity:
            self._given_up.popitem(last=False)
        # Optimizers that are made one after the other number the names of their parameters.
        own = [name for name, _ in keys if name and without_optimizer(name) == name]
        pattern = _alike([name for name in own if not is_unnamed(name)])
        # A name counts twice, because a program with many operations starts all of them before any comes back.
        if self._pattern and pattern and _shape(self._pattern[0]) == _shape(pattern[0]) and not self._told:
            self.unrepeated, self._told = self._pattern[:SHOWN_NAMES], True
        self._pattern = pattern if 2 * len(pattern) > len(keys) else []
        return self._recall(ids, ranks)

    def recall_all(self, ranks: Iterable[int], which: Callable[[Key], bool]) -> list[int]:
        """Starts to recall the ids of all keys for which `which` holds."""
        return self._recall([one for one, key in self._live.items() if which(key)], ranks)

    def recall_named(self, names: Collection[str], ranks: Iterable[int]) -> list[int]:
        """Starts to recall the ids that operations of these names may have: of an unnamed one it is known only that it
        has the id of an earlier unnamed one.
        """
        numbered = any(is_unnamed(name) for name in names)

        def may_be(key: Key) -> bool:
            return is_unknown(key) or key[0] in names or (numbered and is_unnamed(key[0]))

        return self.recall_all(ranks, may_be)

    def recall_but(self, known: Set[int], ranks: Iterable[int]) -> list[int]:
        """Starts to recall all ids but those that are known."""
        return self._recall([one for one in self._live if one not in known], ranks)

    def _recall(self, ids: list[int], ranks: Iterable[int]) -> list[int]:
        waiting_for = set(ranks)
        for one in ids:
            self._drop(one)
            self._recalled[one] = set(waiting_for)
        return ids

    def _drop(self, one: int) -> None:
        key, payer = self._live.pop(one), self._payer.pop(one)
        del self._id_of[key]
        if self._budget is not None:
            self._budget.release(payer, key_bytes(key))

    def clear(self) -> None:
        """Forgets all ids, because the process set is gone."""
        for one in list(self._live):
            self._drop(one)

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


def _alike(names: Iterable[str]) -> list[str]:
    """The most names that differ in their numbers only."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_shape(name), []).append(name)
    return max(groups.values(), key=len, default=[])


def _shape(name: str) -> str:
    return re.sub(r"[0-9]+", "0", name)
