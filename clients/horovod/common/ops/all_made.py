"""Whether all ranks have made all gradients of a step: one small operation in each step of an optimizer."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from horovod._core import DType, Handle, OpSpec
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops.undecided import UNDECIDED, before_waiting
from horovod.worker.runtime.context import current

_REMEDY = (
    "loss.backward() waits here until every rank has made its gradients or calls optimizer.step() or "
    "optimizer.synchronize(). A rank that makes no gradient at all in a step must call optimizer.synchronize() before "
    "it calls any other operation."
)


class AllMade:
    """`say` once in each step, then `everywhere`, or `wait` where the answer does not matter any more; then `reset`.

    It is reduced as the gradients are, but always in the host's memory, so that it travels with the last of them.
    """

    def __init__(self) -> None:
        self._wire: str | None = None
        self._lacking = _zero()  # more than 0 after the reduction: a rank has not made all
        self._handle: Handle | None = None
        self.said = False

    def name(self, names: Iterable[str]) -> None:
        """Of the parameters, in any order; the first time counts."""
        first = min(names, default=None)
        if self._wire is None and first is not None:
            self._wire = f"allreduce.{first}.all_made"

    def say(self, complete: bool, spec: OpSpec, alone: bool, quiet: bool) -> None:
        """Whether this rank has made all; `alone`: there is no other. `quiet` as the engine's: a wait follows.

        spec: of the gradients, but Average or Sum.
        """
        if self._wire is None:
            return
        self.said = True
        self._lacking[0] = 0.0 if complete else 1.0
        if not alone:
            address, _ = self._lacking.buffer_info()
            span = (address, address, DType.FLOAT32, (1,))
            self._handle = current().engine.submit(spec, self._wire, (span,), self._lacking, wait_follows=quiet)

    def everywhere(self) -> bool:
        """Waits for the other ranks.

        Raises HorovodInternalError: a rank was lost, or waits for another operation without having taken part.
        """
        try:
            self.wait()
        except HorovodInternalError as error:
            if "wait for each other" in str(error):
                raise HorovodInternalError(f"{error} {_REMEDY}") from None
            raise
        return self._lacking[0] == 0.0

    def wait(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            if UNDECIDED:
                before_waiting()
            handle.result()

    def reset(self) -> None:
        """The next step. Operations that were not waited for may still run, in memory of their own."""
        self.said = False
        if self._handle is not None:
            self._handle = None
            self._lacking = _zero()


def _zero() -> array[float]:
    return array("f", [0.0])
