"""The spans of a member's beginning: its first negotiation, and its first step.

The negotiation is from the first announcement until nothing is undecided. The step ends when the engine has run as many
operations as were announced until then: no hook of a framework is needed, and a program whose first step is not one of
an optimizer has one as well. Made only where a trace is asked for.
"""

from __future__ import annotations

from horovod.base.telemetry import tracing

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
