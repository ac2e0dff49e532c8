"""Does another rank wait for a word of this one? Asked by a thread that waits long for an operation.

The backward pass of an optimizer waits until all ranks have made their gradients (all_made.py). A rank whose script
goes another way makes none, and may at the same time wait for something that the others do only after their backward
pass: the average of a loss, a barrier, the backward pass of another optimizer. Neither could go on. So a rank that
waits for whatever it is, longer than usual, asks all ranks of the optimizer: a small operation, which is complete when
they all wait and ask. From what they say follows whether this one holds the others up (step_words.held_up), and then it
answers.

In training that goes well, hardly any question is asked. One that is asked stands until all other ranks have asked it
too; nobody waits for it. There is one at most for each optimizer, however often threads wait.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from horovod import _core
from horovod.common import optimizer_numbers
from horovod.common.basics import Sum
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops.specs import reduction
from horovod.common.ops.step_words import NUMBERS, Asked, any_waits, held_up, numbers
from horovod.common.process_sets import count_unawaited
from horovod.worker.runtime.context import Context, current

if TYPE_CHECKING:
    from horovod.common.ops.all_made import AllMade

# How the names of questions begin. Reports of operations that wait for a rank leave questions out.
ENDING: Final = ".question"

# A rank that has not begun a step asks only after so long, which is short beside a rare step without gradients: the
# other ranks of most programs that wait longer than a millisecond for each other compute meanwhile.
PATIENCE_US: Final = 10_000
# A thread that goes on waiting asks again when it has waited so many times as long: seldom enough for the coordinator
# to see that nothing goes on where ranks wait for each other for good.
AGAIN: Final = 4
# But at once, and so often in a wait, when a rank waits for words: it takes two or three questions to know who for.
AT_ONCE: Final = 5

# So many optimizers that are gone are still asked for: a search for hyperparameters makes one after the other.
GONE_KEPT: Final = 16

# A round's number has the joins of its world in its high bits, and in so many low bits the rounds since the last join.
# Questions add up the numbers of all ranks in 64 bits, which is enough for 100,000 ranks and a million joins.
ROUND_BITS: Final = 24

_all: list[AllMade] = []  # replaced and never changed: other threads go through it
_listeners: Final[list[Callable[[], None]]] = []
_joins: tuple[weakref.ref[Context] | None, int] = None, 0  # (the world, how often all its ranks have joined)


def watch(one: AllMade) -> None:
    """From now on, threads that wait long ask the question of this optimizer.

    Also for a while when its optimizers are gone: on another rank they may have lived long enough for a question, which
    then stands until this rank asks it too.
    """
    global _all
    if one in _all:
        return
    with contextlib.suppress(ValueError):  # there is no world
        one.round = max(one.round, first_round())  # ranks may have joined meanwhile
    gone = [other for other in _all if not other.optimizers and not other.question.stands()]
    _all = [*(other for other in _all if other not in gone[:-GONE_KEPT]), one]
    _core.on_impatience(_wait_lasts)
    count_unawaited(standing)


def standing(process_set: int) -> int:
    """How many questions are unanswered in the process set with this engine number."""
    return sum(one.question.stands() and one.question.process_set == process_set for one in _all)


def when_joined(listener: Callable[[], None]) -> None:
    """From now on `listener` is called when all ranks have joined."""
    _listeners.append(listener)


def joined() -> None:
    """All ranks have joined. They took part in different numbers of rounds, so the numbers of rounds begin anew."""
    global _joins
    world = current()
    _joins = weakref.ref(world), 1 + (first_round() >> ROUND_BITS)
    for one in _all:
        one.round = first_round()
    for listener in _listeners:
        listener()


def first_round() -> int:
    """The number of the first round of words in this world, or after the last join there.

    No round before that has a number as great: a question from before the join may stand still.
    """
    world, joins = _joins
    return joins << ROUND_BITS if world is not None and world() is current() else 0


def _wait_lasts(wait: int, waited_us: int, process_set: int) -> None:
    """Called while this thread waits long for an operation of a process set. Each wait has a number."""
    optimizer_numbers.guess_late()
    ident = threading.get_ident()
    # Of a backward pass on a GPU, autograd's thread waits while the one that trains waits in backward().
    trains = isinstance(threading.current_thread(), threading._DummyThread)
    soon = any(one.waits is not None for one in _all)
    for one in _all:
        if trains or one.thread == ident:
            with contextlib.suppress(ValueError, HorovodInternalError):  # the wait itself raises these errors too
                one.question.look(wait, waited_us, process_set, 0 if soon or one.begun else PATIENCE_US)


class Question:
    """The question that ranks ask for one optimizer: does another rank wait for a word of this one?"""

    def __init__(self, owner: AllMade) -> None:
        self._owner = owner
        self.forget()

    def forget(self) -> None:
        self._handle: _core.Handle | None = None  # the question's operation while it is unanswered, else None
        self.process_set = 0  # in which it stands
        self._sums = array("q", [0] * NUMBERS)
        self._asked = Asked(None, 0, False)
        self._state: object = None  # what this rank waited for when it asked
        # What this rank waited for when it asked, and still waited for when all others had answered.
        self._confirmed: object = None
        self._wait = 0  # the wait in which this rank asked
        self._due_us = 0  # how long that wait must last before this rank asks again
        self._at_once = 0  # how often in that wait this rank has asked again at once

    def stands(self) -> bool:
        return self._handle is not None and not self._handle.done()

    def look(self, wait: int, waited_us: int, process_set: int, patience_us: int) -> None:
        owner = self._owner
        owner.enter_world()
        spec, size = owner.reduction()
        # A thread that waits in the process set of the words also moves the words on. If this rank waits in another
        # set, the engine's background thread has to do so.
        quiet = process_set == spec.process_set
        state = (owner.waits, owner.round) if owner.waits is not None else wait
        if self._wait != wait:
            self._wait, self._due_us, self._at_once = wait, patience_us, 0
        if self._handle is not None:
            if not self._handle.done():
                return
            handle, self._handle = self._handle, None
            handle.result()
            if any_waits(self._sums) and self._at_once < AT_ONCE:
                self._due_us = 0
                self._at_once += 1
            self._confirmed = state if self._state == state else None
            waits = held_up(self._sums, size, self._asked) if self._confirmed is not None else None
            if waits is not None:
                owner.answer(waits, quiet)
        if size < 2 or waited_us < self._due_us:
            return
        self._due_us = AGAIN * waited_us
        self._state, self._asked = state, Asked(owner.waits, owner.round, self._confirmed == state)
        self._ask(spec.process_set, f"{owner.wire}{ENDING}", quiet)

    def _ask(self, process_set: int, wire: str, quiet: bool) -> None:
        self._sums[:] = array("q", numbers(self._asked))
        address, _ = self._sums.buffer_info()
        span = (address, address, _core.DType.INT64, (NUMBERS,))
        spec = reduction(_core.OpType.ALLREDUCE, Sum, 1.0, 1.0, process_set)
        self.process_set = process_set
        self._handle = current().engine.submit(spec, wire, (span,), self._sums, wait_follows=quiet, unawaited=True)
