"""Whether all ranks train the same weights: when that is looked at, what is compared, and what a person is told.

Ranks that begin with different weights (a forgotten broadcast, a checkpoint that was loaded on one rank only) take the
same steps from different places, and no collective notices. So each rank makes a digest of what its optimizer holds,
and the digests are compared: in the first step of a world, after load_state_dict, and every so many steps if a setting
says so. That costs one operation that a step has anyway (step_words.py), and only if digests differ a second one, in
which ranks tell each other the digest of each parameter.

A rank may be due for a comparison alone, for example because it alone has loaded a checkpoint. It brings its digest,
hears that others have none, and all of them bring one in the next step. So no rank waits for another that does not
compare.
"""

from __future__ import annotations

import weakref
import zlib
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from horovod._core import DType, Handle, OpType
from horovod.base.errors import TrainingCode, coded
from horovod.base.words import ranks_in_words, shortened
from horovod.common.basics import Sum
from horovod.common.ops.objects import allgather_object
from horovod.common.ops.specs import reduction, set_number, set_size
from horovod.common.ops.step_words import FLAGS, Digests, Heard, Outcome, Word, flags, heard
from horovod.common.optimizer_numbers import Order, check_order
from horovod.common.process_sets import ProcessSet
from horovod.common.script import warn_the_script
from horovod.worker.runtime.context import current

_MOST_NAMES: Final = 3


@dataclass(frozen=True)
class Item:
    """One thing that is equal on all ranks: the digest of a tensor, or a number."""

    digest: int | float
    size: float | None = None  # the size that a person is shown: the norm of a tensor, or the number itself


# By owner ("parameter 'fc.weight'", "parameter group 0"), then by what it is: "" for the owner itself, or a name in it.
# Only owners that all ranks have are compared, and of those everything must be there on all ranks.
Held = Mapping[str, Mapping[str, Item]]

SCALER: Final = "the GradScaler"  # an owner


class Kind(Enum):
    """Of what differs, for the sentence on what to do."""

    PARAMETER = "parameter"
    STATE = "state"  # the state, or an option, of the optimizer
    SCALER = "scaler"


class Exchange:
    """The word of each step for an optimizer that has no other one: `say` begins, `hear` waits."""

    def __init__(self, wire: str, process_set: ProcessSet) -> None:
        """wire: the operation's name, which may change between two words."""
        self.wire = wire
        self._process_set = process_set
        self._sums = array("f")
        self._size = 1
        self._handle: Handle | None = None

    def say(self, digest: int | None) -> None:
        self._sums = array("f", flags(Word.FINAL, False, digest))
        self._size = set_size(self._process_set)
        if self._size > 1:
            address, _ = self._sums.buffer_info()
            span = (address, address, DType.FLOAT32, (FLAGS,))
            spec = reduction(OpType.ALLREDUCE, Sum, 1.0, 1.0, set_number(self._process_set, "Allreduce"))
            self._handle = current().engine.submit(spec, self.wire, (span,), self._sums, wait_follows=False)

    def hear(self) -> Heard:
        """HorovodInternalError: a rank was lost."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.result()
        return heard(self._sums, self._size, 1.0)


class SameWeights:
    """One for each optimizer. `digest` goes with the rank's word; `take` gets what came of all ranks' words.

    digest: makes a digest of DIGEST_BITS bits of all that the optimizer holds. held: one of each thing.
    remedy: a sentence that says what to write for what differs. made: where the script made the optimizer is compared
    too, because of several with equal names the ranks may mean different ones.
    """

    def __init__(
        self,
        digest: Callable[[], int],
        held: Callable[[], Held],
        process_set: ProcessSet,
        remedy: Callable[[set[Kind]], str],
        made: Order | None = None,
    ) -> None:
        self._digest = digest
        self._held = held
        self._process_set = process_set
        self._remedy = remedy
        self.made = made
        self._due = True
        self._later = False  # whether a comparison is due and waits for a rank that has joined
        self._world: weakref.ref[object] | None = None  # the world in which a comparison was due last
        self.steps = 0  # steps that were taken

    def ask(self) -> None:
        """Compares in the next step: this rank's optimizer holds something new."""
        self._due = True

    def digest(self) -> int | None:
        """Before a step is taken; None if no comparison is due."""
        context = current()
        if self._world is None or self._world() is not context:
            self._world, self._due, self._later = weakref.ref(context), True, False
        is_ignored = context.settings.different_weights == "ignore"
        if not self._due or self._later or (is_ignored and self.made is None):
            return None
        weights = 0 if is_ignored else self._digest()
        return weights if self.made is None else weights ^ zlib.crc32(self.made.place.encode())

    def take(self, heard: Heard, wire: str) -> None:
        """All ranks have heard the same. wire: begins the operation's name.

        ValueError, on all ranks: they made optimizers in another order, or what they hold differs, and the setting says
        that this is an error.
        HorovodInternalError: a rank was lost.
        """
        if heard.everybody:
            self._later = False
        if heard.outcome is Outcome.OVER:
            self.steps += 1
            every = current().settings.compare_weights_steps
            if every and self.steps % every == 0:
                self._due = True
        if heard.digests is Digests.NONE:
            return
        if heard.digests is Digests.LATER:
            self._later = True
        if heard.digests is Digests.WANTED:
            self._due = True
        if heard.outcome is not Outcome.OVER or heard.digests not in (Digests.EQUAL, Digests.DIFFERENT):
            return  # ranks are at different places in the step, where options such as the learning rate may differ
        self._due = False
        if heard.digests is Digests.DIFFERENT:
            self._tell(wire)

    def _tell(self, wire: str) -> None:
        is_ignored = current().settings.different_weights == "ignore"
        own = {} if is_ignored else self._held(), None if self.made is None else self.made.line()
        everybody = allgather_object(own, f"{wire}.same_weights", self._process_set)
        by_rank = dict(zip(self._process_set.ranks or range(len(everybody)), everybody, strict=True))
        ranks = list(by_rank)
        check_order({rank: line for rank, (_, line) in by_rank.items() if line is not None})
        found = sentence({rank: held for rank, (held, _) in by_rank.items()}, self.steps, self._remedy)
        if found is None:
            return
        if current().settings.different_weights == "error":
            raise ValueError(coded(TrainingCode.DIFFERENT_WEIGHTS, f"{found} No rank has taken the step."))
        if current().world.rank == ranks[0]:
            warn_the_script(coded(TrainingCode.DIFFERENT_WEIGHTS, found))


def sentence(by_rank: Mapping[int, Held], step: int, remedy: Callable[[set[Kind]], str]) -> str | None:
    """Which things differ from the first rank's, and where; None if only owners differ that not all ranks have."""
    first, *others = by_rank
    common = [owner for owner in by_rank[first] if all(owner in by_rank[rank] for rank in others)]
    different: dict[str, list[int]] = {}  # what differs, in words -> the ranks that differ from the first one
    shown = ""
    kinds: set[Kind] = set()
    for owner in common:
        of_first = by_rank[first][owner]
        names = dict.fromkeys([*of_first, *(name for rank in others for name in by_rank[rank][owner])])
        for name in names:
            mine = of_first.get(name)
            ranks = [rank for rank in others if _differ(mine, by_rank[rank][owner].get(name))]
            if not ranks:
                continue
            kinds.add(Kind.PARAMETER if not name else Kind.SCALER if owner == SCALER else Kind.STATE)
            if not different:
                theirs = by_rank[ranks[0]][owner].get(name)
                what = "norm " if not name else ""
                shown = f" ({what}{_size(mine)} on rank {first}, {_size(theirs)} on rank {ranks[0]})"
            different[f"{name!r} of {owner}" if name else owner] = ranks
    if not different:
        return None
    (name, ranks), more = next(iter(different.items())), list(different)[1:]
    also = f"; so {'does' if len(more) == 1 else 'do'} {shortened(more, _MOST_NAMES)}" if more else ""
    return (
        f"Ranks train different models: in step {step}, {name}{shown} on {ranks_in_words(ranks)} differs from that of "
        f"rank {first}{also}. {remedy(kinds)}"
    )


def _differ(mine: Item | None, theirs: Item | None) -> bool:
    return (mine and mine.digest) != (theirs and theirs.digest)


def _size(item: Item | None) -> str:
    if item is None:
        return "none"
    return "another value" if item.size is None else f"{item.size:.6g}"
