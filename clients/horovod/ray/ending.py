"""Workers end with the executor that has them, also where nobody calls shutdown().

The garbage collector may find an executor in any thread, one that holds a lock of Ray among them, so workers end in a
thread of their own then. At the end of the interpreter they end at once, before Ray does.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import ray

_waiting: Final[set[Ending]] = set()


class Ending:
    """Calls `end` when `owner` is garbage, or when the interpreter ends; never after `cancel`.

    settle: called before, where `owner` is garbage: waits for what `owner` has started and others wait for. Neither
    function may hold a reference to `owner`.
    """

    def __init__(self, owner: Any, settle: Callable[[], None], end: Callable[[], None]) -> None:
        self._settle, self._end = settle, end
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(owner, self._start)
        self._finalizer.atexit = False
        _waiting.add(self)

    def cancel(self) -> None:
        self._finalizer.detach()
        _waiting.discard(self)

    def now(self) -> None:
        self.cancel()
        if os.getpid() != self._pid:
            return  # a forked child has a copy, and the workers are not its own
        if ray.is_initialized():  # else Ray has ended the workers, and would be started anew by what is called here
            with contextlib.suppress(Exception):
                self._end()

    def _start(self) -> None:
        threading.Thread(target=self._run, name="horovod-ray-ending", daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            self._settle()
        if self in _waiting:  # the interpreter has not ended meanwhile
            self.now()


@atexit.register  # Ray has registered its own before, when it was imported, so this comes first
def _at_exit() -> None:
    for ending in list(_waiting):
        ending.now()
