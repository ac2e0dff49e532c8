"""The error of a world that cannot form. Failures after that are the engine's and carry the client's own type."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Final

from horovod.base.errors import STATE_LOST_EXIT
from horovod.base.settings import ROWS
from horovod.base.words import for_people

# Ends the reason of a member that had done its work, for the members that still wait for it.
FEWER_BATCHES: Final = (
    "If it had fewer batches than this rank, let all ranks call hvd.join() after their last batch, or give them equal "
    "numbers of batches (drop_last=True, a DistributedSampler). HOROVOD_CHECK_CALL_SITES=1 finds an operation without "
    "a name that only some ranks call."
)


class StartError(ValueError):
    """A whole sentence: what was wrong, where, and what to do. A ValueError because hvd.init() promises one."""


class JobDoneError(SystemExit):
    """An elastic job has done its work while this process waited for a place in it.

    As a SystemExit of code 0 it ends the program in order, which has nothing to do; who has something else to do
    catches it.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(0)
        self.sentence = sentence

    def __str__(self) -> str:
        return self.sentence


class StateLostError(StartError, SystemExit):
    """What an elastic job had committed is lost, as no process is left that held it, and the job may not begin anew.

    Where nobody catches it, the program ends with STATE_LOST_EXIT, so that its launcher does not try again.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.code = STATE_LOST_EXIT


class MemberLostError(StartError):
    """Another member was lost before the world stood. A process that joins once more may get another world."""


class WorldNeverStoodError(MemberLostError):
    """The coordinator ended before it had told every member of the world. All join again, and get another one."""


# What may have a sentence to add behind the traceback of an error that ends the program; "" where it has none. Bindings
# of frameworks add theirs.
HINTS: list[Callable[[BaseException], str]] = []


def print_as_a_sentence() -> None:
    """From now on a StartError that is not caught ends the program with its sentence alone, without a traceback.

    What went wrong is outside the program then, and the stack would only bury it. HOROVOD_LOG_LEVEL=debug (or trace)
    keeps the traceback, and so does a program that has set sys.excepthook itself.
    """
    if sys.excepthook is not sys.__excepthook__:
        return
    if ROWS["log_level"].text(os.environ).lower() in ("debug", "trace"):
        return
    sys.excepthook = _sentence_hook


def _sentence_hook(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
    if isinstance(error, StartError):
        print(for_people(f"horovod: {error}"), file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)
        for hint in (hint(error) for hint in HINTS):
            if hint:
                print(for_people(f"horovod: {hint}"), file=sys.stderr)
