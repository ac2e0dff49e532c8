"""Whether all ranks have made all gradients of a step, and go on alike: the words of step_words.py over the wire.

A step takes one round of words, in which all ranks say MADE. The round is one small operation, reduced as the gradients
are but always in the host's memory, so that it travels with the last of them. There are more rounds in a step in which
a rank has not made all gradients.

A word that this rank says because others wait for it, while its own thread waits for something else (questions.py), is
an operation that nobody waits for at first: the next word comes after it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from array import array
from dataclasses import replace
from typing import Final

from horovod._core import DType, Handle, OpSpec, OpType
from horovod.base.errors import OperationCode, coded
from horovod.common.basics import Average, Sum
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops import questions
from horovod.common.ops.questions import Question
from horovod.common.ops.specs import reduction, set_number, set_size
from horovod.common.ops.step_words import FLAGS, Heard, Outcome, Past, Word, flags, heard
from horovod.common.process_sets import ProcessSet
from horovod.worker.runtime.context import Context, current

_by_name: Final[dict[tuple[str, tuple[int, ...]], AllMade]] = {}


def all_made(first: str, process_set: ProcessSet, optimizer: object) -> AllMade:
    """The AllMade of an optimizer, for as long as `optimizer` lives or until it has another name.

    first: the first of its parameters' names.
    """
    wire = f"allreduce.{first}.all_made"
    key = wire, tuple(process_set.ranks or ())
    one = _by_name.get(key)
    if one is None:
        one = _by_name[key] = AllMade(wire, process_set)
    if not one.optimizers:
        one.end()  # the optimizer that had this object before is gone, perhaps in the middle of a step
    one.optimizers.add(optimizer)
    questions.watch(one)
    one.process_set = process_set  # it has the same ranks as before, but may belong to another world
    return one


class AllMade:
    """What this rank says of the steps of one optimizer: `say` and `hear` or `until_over` in each, then `end`.

    Optimizers of one name, of which the later ones were made after a restart of the numbers, share one: rounds are
    counted by name.
    """

    def __init__(self, wire: str | None, process_set: ProcessSet) -> None:
        self.wire = wire
        self.round = 0  # the number of the next round of words, see questions.first_round()
        self.word: Word | None = None  # the last word that this rank said in this step
        self.waits: Word | None = None  # MADE or FINAL while this rank waits for the others' words to it, else None
        self.begun = False  # whether a gradient of this step has been made
        self.submitted = False  # whether all gradients of this step have been submitted
        self.thread = threading.get_ident()  # the thread that trains
        self.process_set = process_set
        self.optimizers: weakref.WeakSet[object] = weakref.WeakSet()  # the optimizers that use this object
        self.question = Question(self)
        self._op: int = Average
        self._factor = 1.0
        self._world: Context | None = None
        self._sums = _zeros()
        self._size = 1  # ranks to which the last word went
        self._handle: Handle | None = None  # the operation of a word whose answers are not here yet
        self._earlier = False  # whether that word belongs to a step that was given up
        self._released = False  # whether the other ranks need no more words of this step

    def reduce_as(self, op: int, factor: float) -> None:
        """Reduces words as gradients are: averaged or summed, scaled by 1 / factor before and by factor afterwards."""
        self._op = Average if op == Average else Sum
        self._factor = factor

    def reduction(self) -> tuple[OpSpec, int]:
        """The spec of the words, and the number of ranks."""
        number = set_number(self.process_set, "Allreduce")
        spec = reduction(OpType.ALLREDUCE, self._op, 1.0 / self._factor, self._factor, number)
        return spec, set_size(self.process_set)

    def say(
        self,
        word: Word,
        changed: bool = False,
        quiet: bool = True,
        digest: int | None = None,
        past: Past | None = None,
    ) -> None:
        """Says a word to the other ranks. quiet: means what the engine's `wait_follows` does. The rest goes along."""
        self.enter_world()
        self._settle()
        self.word = word
        if word is Word.MADE or word is Word.FINAL:
            self.submitted = True
            self.waits = word
        if self.wire is None or self._released:
            return
        self._sums[:] = array("f", flags(word, changed, digest, past))
        spec, self._size = self.reduction()
        if self._size > 1:
            address, _ = self._sums.buffer_info()
            span = (address, address, DType.FLOAT32, (FLAGS,))
            self._handle = current().engine.submit(spec, self.wire, (span,), self._sums, wait_follows=quiet)
            self._earlier = False

    def hear(self) -> Heard:
        """What follows from the words of all ranks. HorovodInternalError: a rank was lost."""
        if self._released:
            return Heard(Outcome.RELEASED, False)
        self._wait()
        if self.waits is Word.MADE:
            self.waits = None
        return heard(self._sums, self._size, 1.0 if self._op == Sum else 1.0 / self._size)

    def until_over(self, changed: bool, digest: int | None = None) -> Heard:
        """After FINAL: waits until all ranks have said so, unless one is away, or all stop since ranks have parted."""
        while not (it := self.hear()).parted and it.outcome not in (Outcome.OVER, Outcome.RELEASED):
            self.say(Word.FINAL, changed, digest=digest)
        return replace(it, changed=it.changed or changed)

    def answer(self, waits: Word, quiet: bool) -> None:
        """Others have said `waits` and can't go on before this rank, which waits for something else, says a word."""
        if self._handle is not None or self.waits is not None or self._released:
            return
        if waits is Word.MADE and self.word is None:
            self.say(Word.LACKS, quiet=quiet)
        elif waits is Word.FINAL and self.word is not None and self.submitted:
            self.say(Word.AWAY, quiet=quiet)

    def leave(self) -> None:
        """The script gives the step up, so ranks that are in it need not wait for this one."""
        if self.word is not None and self.submitted and self._handle is None and not self._released:
            with contextlib.suppress(ValueError, HorovodInternalError):  # the world has ended or been replaced
                if self._world is current():
                    self.say(Word.AWAY, quiet=False)

    def end(self) -> None:
        """Ends the step; what follows belongs to the next one."""
        self.word = self.waits = None
        self.begun = self.submitted = self._released = False
        self._earlier = self._handle is not None

    @property
    def has_heard(self) -> bool:
        """Whether this rank has heard words of others, in this world and since the last hvd.join()."""
        return self._world is current() and self.round > questions.first_round()

    def enter_world(self) -> None:
        if self._world is not current():
            self._forget_world()
            self._world = current()
            self._world.when_closed.append(self._forget_world)
            self.round = questions.first_round()
            self._sums = _zeros()  # a new buffer, since the engine of the old world may still use the other one

    def _forget_world(self) -> None:
        """A world that is over goes with its engine, which may hold memory of a GPU."""
        self._world = self._handle = None
        self.question.forget()

    def _settle(self) -> None:
        """Waits for the others' words to one that was said while this rank waited for something else."""
        if self._handle is None:
            return
        earlier = self._earlier
        self._wait()
        self._released = not earlier and heard(self._sums).outcome is Outcome.RELEASED

    def _wait(self) -> None:
        if self._world is None:
            raise HorovodInternalError(coded(OperationCode.SHUT_DOWN, "Horovod has been shut down."))
        if self._handle is None:
            return  # this rank is the only one
        handle, self._handle = self._handle, None
        handle.result()
        self.round += 1


def _zeros() -> array[float]:
    return array("f", [0.0] * FLAGS)
