"""Steps in which this rank's backward pass has made only some of an optimizer's gradients.

backward() waits for the averages on ranks that have made all gradients, once all ranks said that they have
(GradientReducer). A rank that has made only some can't say so yet: another backward pass may make the others. But if it
waited for another operation meanwhile, such as the average of a loss, the two would wait for each other. So before this
rank waits for anything, it says of each such optimizer that not all gradients are made, and no rank waits for that one.
"""

from __future__ import annotations

import weakref
from typing import Final, Protocol


class Undecided(Protocol):
    """An optimizer's reducer."""

    def say_incomplete(self) -> None:
        """Tells the other ranks that this one has not made all gradients."""


# By id. One thread at a time writes and reads: the one that trains, or autograd's while that one waits in backward().
# Empty nearly always, so that a waiting thread looks here before it calls.
UNDECIDED: Final[dict[int, weakref.ref[Undecided]]] = {}


def before_waiting() -> None:
    """To call before this rank waits for an operation, where UNDECIDED is not empty."""
    while UNDECIDED:
        _, reference = UNDECIDED.popitem()
        if (one := reference()) is not None:
            one.say_incomplete()
