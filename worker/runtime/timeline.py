"""The timeline of a member: when it is written, and where to.

The engine records and writes it (csrc/engine/timeline.h); rank 0's is the one that counts, so other ranks only check
that they are asked for something that makes sense.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Final

from horovod.base.errors import EngineCode, SettingCode, code_of, coded
from horovod.base.settings import Settings
from horovod.base.telemetry import tracing
from horovod.worker.runtime.errors import StartError

if TYPE_CHECKING:
    from horovod._core import Engine


log = logging.getLogger(__name__)

DYNAMIC: Final = "DYNAMIC"  # a value of HOROVOD_TIMELINE: no file until the program asks for one


def of_epoch(path: str, epoch: int) -> str:
    """`trace.epoch-2.json` for `trace.json`."""
    stem, suffix = os.path.splitext(path)
    return f"{stem}.epoch-{epoch}{suffix}"


class Timeline:
    """At most one file at a time. Thread-safe, as the engine is."""

    def __init__(self, settings: Settings, engine: Engine, rank: int) -> None:
        self._settings = settings
        self._engine = engine
        self._writes = rank == 0

    def start_as_set(self, later_epoch: int | None = None) -> None:
        """What HOROVOD_TIMELINE asks for; StartError when the file can't be written.

        later_epoch: of a world to which this process has come from another one of its job. Such a world has a file of
        its own (`of_epoch`), or that of the world before would be lost. Where it can't be written, a warning says so.
        """
        path = self._settings.timeline
        if path is None or path == DYNAMIC:
            return
        if later_epoch is not None:
            path = of_epoch(path, later_epoch)
        try:
            self.start(path, self._settings.timeline_mark_cycles)
        except ValueError as error:
            if later_epoch is not None:
                log.warning("This world has no timeline. %s", error)
                return
            code = code_of(error) or EngineCode.TIMELINE
            raise StartError(coded(code, f"HOROVOD_TIMELINE={path} is not possible on rank 0: {error}")) from error

    def start(self, path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Begins a file on rank 0, after completing the one that is written. ValueError when it can't be written."""
        if self._settings.timeline is None:
            raise ValueError(
                coded(
                    SettingCode.MISSING_SETTING,
                    "hvd.start_timeline() needs HOROVOD_TIMELINE to be set before hvd.init(): to a path, or to "
                    "DYNAMIC.",
                )
            )
        name = os.fspath(path)
        if not isinstance(name, str) or not name or "\0" in name:
            sentence = f"The timeline file {path!r} can't be written: expected the path of a file."
            raise ValueError(coded(EngineCode.TIMELINE, sentence))
        if self._writes:
            self._engine.start_timeline(name, mark_cycles, time.time_ns() // 1000)

    def stop(self) -> bool:
        """Completes the file; returns False when there is none."""
        running, problem = self._engine.stop_timeline()
        if problem:
            log.warning("The timeline is not complete. %s", problem)
        return running

    def stop_as_asked(self) -> None:
        """hvd.stop_timeline(): logs a sentence when there is nothing to stop."""
        if not self.stop() and self._writes:
            log.info("hvd.stop_timeline() has nothing to do: no timeline is being written.")

    def forget(self) -> None:
        """In a forked child, which must not write to its parent's file."""
        self._engine.forget_timeline()


# The spans of a member's beginning: its first negotiation, and its first step.
#
# The negotiation is from the first announcement until nothing is undecided. The step ends when the engine has run as
# many operations as were announced until then: no hook of a framework is needed, and a program whose first step is not
# one of an optimizer has one as well. Made only where a trace is asked for.

LOOK_MS = 20  # how often the engine is asked until the step ends


class FirstStep:
    """Calls come from several threads, one at a time."""

    def __init__(self, parent: str, rank: int) -> None:
        self._parent, self._rank = parent, rank
        self._announced = 0
        self._negotiation: tracing.Span | None = None
        self._step: tracing.Span | None = None
        self._decided = False
        self.is_over = False

    @property
    def runs(self) -> bool:
        return self._step is not None and not self.is_over

    def announced(self, count: int) -> None:
        if self._decided or not count:
            return
        if self._step is None:
            self._step = tracing.begin("horovod.first_step", self._parent, rank=self._rank)
            self._negotiation = tracing.begin("horovod.negotiation", self._step.traceparent, rank=self._rank)
        self._announced += count

    def decided(self) -> None:
        """Nothing that was announced is undecided."""
        if self._negotiation is not None and not self._decided:
            self._decided = True
            self._negotiation.set(operations=self._announced)
            self._negotiation.end()

    def look(self, operations_run: int) -> None:
        if self._decided and self._step is not None and operations_run >= self._announced:
            self.end()

    def end(self, error: str = "") -> None:
        """Idempotent; also when the world ends before."""
        if not self.is_over:
            self.is_over = True
            for span in (self._negotiation, self._step):
                if span is not None:
                    span.end(error)
