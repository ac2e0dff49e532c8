"""What ranks say to each other at the end of a step of an optimizer, and what follows. Pure: no operation, no clock.

    MADE    the backward pass has made all gradients, and waits for the averages
    FINAL   the script has called synchronize() or step(); zeros take part in place of gradients that were not made
    LACKS   this rank can't go on before another one does, and has not made all of its gradients
    AWAY    this rank can't go on before another one does, and has submitted all of its gradients; it is not in step()

All ranks say a word, the flags of all words are added up, and from the sums follows one Outcome, the same on all ranks:

    all MADE, or all FINAL       OVER       the step's reduction is over
    some MADE, the others FINAL  AVERAGED   all is submitted, so backward() waits for the averages on ranks that said
                                            MADE; they say FINAL in their own step(), where the others wait for that
    some LACKS                   UNMADE     no backward() waits; all say FINAL later
    some AWAY                    RELEASED   who is in step() goes on without hearing the FINAL of who is away

A rank that has joined (hvd.join) adds zeros to the flags, so it agrees to everything.

A word also says what became of the averages of the step before (Past). From the sums follows whether some ranks took a
step with them and others dropped them, and whether all have dropped them and made no gradients since.

A word may carry a digest of the weights that its rank trains (common/same_weights.py), as flags too: one for each bit,
and one that says that there is a digest. From the sums follows whether the digests are equal, or that ranks without one
must bring theirs in the next step.

To say LACKS or AWAY a rank must know that others wait for it and can't go on without its word. `held_up` finds that out
from the sums of a question, in which each rank says what it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final


class Word(IntEnum):
    MADE = 0
    FINAL = 1
    LACKS = 2
    AWAY = 3


class Outcome(Enum):
    OVER = "over"
    AVERAGED = "averaged"
    UNMADE = "unmade"
    RELEASED = "released"


class Past(IntEnum):
    """What a rank did with the averages of the last step. It says none of these where it does not know."""

    STEPPED = 0
    DROPPED = 1  # cleared without a step, and made gradients since
    EMPTY = 2  # cleared without a step, and made no gradients since


class Digests(Enum):
    NONE = "none"
    WANTED = "wanted"  # some ranks brought one, others did not
    LATER = "later"  # a rank has joined, so they can't be compared before it is back
    EQUAL = "equal"
    DIFFERENT = "different"


@dataclass(frozen=True)
class Heard:
    outcome: Outcome
    changed: bool  # a rank's script has changed a gradient that is not what all ranks' step() will see
    digests: Digests = Digests.NONE
    everybody: bool = False  # no rank has joined, as far as that is known
    parted: bool = False  # some ranks took a step with the last averages, and others dropped them
    empty: bool = False  # all ranks dropped the last averages, and have nothing to take a step with


DIGEST_BITS: Final = 32
_CHANGED: Final = len(Word)
_PAST: Final = _CHANGED + 1
_HAS_DIGEST: Final = _PAST + len(Past)
_BITS: Final = _HAS_DIGEST + 1
FLAGS: Final = _BITS + DIGEST_BITS


def flags(word: Word, changed: bool, digest: int | None = None, past: Past | None = None) -> list[float]:
    """digest: of DIGEST_BITS bits."""
    made = [0.0] * FLAGS
    made[word] = 1.0
    made[_CHANGED] = float(changed)
    if past is not None:
        made[_PAST + past] = 1.0
    if digest is not None:
        made[_HAS_DIGEST] = 1.0
        made[_BITS:] = [float(digest >> bit & 1) for bit in range(DIGEST_BITS)]
    return made


def heard(sums: Sequence[float], ranks: int = 1, unit: float = 0.0) -> Heard:
    """What all ranks' words mean together. sums: of their flags, perhaps all times one positive number.

    ranks: how many there are. unit: by how much the flag of one rank counts in the sums; 0 if that is not known, and
    then digests are not compared.
    """
    if sums[Word.LACKS] > 0:
        outcome = Outcome.UNMADE
    elif sums[Word.AWAY] > 0:
        outcome = Outcome.RELEASED
    elif sums[Word.MADE] > 0 and sums[Word.FINAL] > 0:
        outcome = Outcome.AVERAGED
    else:
        outcome = Outcome.OVER
    said = sum(sums[:_CHANGED])
    everybody = _of_all(said, ranks, unit)
    stepped, dropped, empty = sums[_PAST:_HAS_DIGEST]
    parted = outcome in (Outcome.OVER, Outcome.AVERAGED) and stepped > 0 and dropped + empty > 0
    digests = Digests.NONE
    if sums[_HAS_DIGEST] > 0:
        digests = _compared(sums, ranks, unit) if everybody else Digests.LATER
    return Heard(outcome, sums[_CHANGED] > 0, digests, everybody, parted, 0 < said < empty + 0.5 * unit)


def _of_all(value: float, ranks: int, unit: float) -> bool:
    """Whether a sum is that of as many flags as there are ranks, rounded as reductions do."""
    return value > (ranks - 0.5) * unit > 0


def _compared(sums: Sequence[float], ranks: int, unit: float) -> Digests:
    if not _of_all(sums[_HAS_DIGEST], ranks, unit):
        return Digests.WANTED
    same = all(value < 0.5 * unit or _of_all(value, ranks, unit) for value in sums[_BITS:])
    return Digests.EQUAL if same else Digests.DIFFERENT


# -- questions ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Asked:
    """What a rank that waits says of itself in a question."""

    # MADE or FINAL: the word to which it waits for the others' words; None: it waits for something else
    waits: Word | None
    round: int  # the number of the round of words in which it takes part next
    confirmed: bool  # it still waits for what it waited for at its last question, which was answered


NUMBERS: Final = 4


def numbers(asked: Asked) -> list[int]:
    waits = asked.waits is not None
    return [int(asked.waits is Word.MADE), int(asked.waits is Word.FINAL), asked.round * waits, int(asked.confirmed)]


def any_waits(sums: Sequence[int]) -> bool:
    """Whether a rank waits for the words of others."""
    return sums[0] + sums[1] > 0


def held_up(sums: Sequence[int], size: int, own: Asked) -> Word | None:
    """Whether other ranks wait for this rank's word and can't go on before it. MADE or FINAL: the word they said.

    Ranks speak in turn, so who waits in a later round than this rank's does not exist, and who did in an earlier one
    has gone on since: a question stands until all ranks have asked it. sums: exact. size: number of the ranks.

    A rank that waits in this rank's own round can't go on before this one speaks. When that is so of all others,
    nothing can come of what this rank waits for. Of a third rank, which waits for something else, the question says
    only that it waited when it asked. If it waited for the same before and after the question before this one, then it
    waited while that was answered. When all ranks did, they wait for each other: nothing had been started then that
    could end the wait of any of them.
    """
    made, final, rounds, confirmed = sums
    waiting = made + final
    if own.waits is not None or waiting == 0 or rounds != waiting * own.round:
        return None
    if waiting < size - 1 and confirmed < size:
        return None
    return Word.MADE if made else Word.FINAL
