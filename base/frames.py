"""Where another thread of this process stands in its program."""

from __future__ import annotations

import gc
import os
import sys
import threading
from types import FrameType

# Held from gc.disable() to the gc.enable() that belongs to it, by a fork too: else the second of two threads, or the
# child, would go on without collections. Reentrant, because a handler of a signal may come in between.
_lock = threading.RLock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def frame_of(thread: threading.Thread) -> FrameType | None:
    """The innermost frame of `thread`; None if it does not run Python."""
    # CPython before 3.11.8 and 3.12.2 makes the frame objects while it holds a lock of the interpreter that each thread
    # needs to begin and to end (gh-106883). If garbage is collected in that moment and a finalizer lets go of the GIL,
    # as the close of a socket does, a thread that begins takes the GIL and waits for that lock: the process hangs.
    with _lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            frames = sys._current_frames()
        finally:
            if collects:
                gc.enable()
    return frames.get(thread.ident or 0)
