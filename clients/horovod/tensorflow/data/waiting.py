"""Waiting until another process has made a file: Linux tells by inotify (man 7 inotify)."""

from __future__ import annotations

import ctypes
import os
import select
from contextlib import ExitStack
from pathlib import Path
from typing import Final

_CREATED: Final = 0x100  # IN_CREATE
_MOVED_TO: Final = 0x80  # IN_MOVED_TO
# inotify reports no files that another host makes in a shared folder, so the folder is also looked at this often.
_LOOK_AGAIN_S: Final = 1.0


def wait_for_file(path: Path) -> None:
    """Returns when there is a file of that name, however long it takes."""
    with ExitStack() as stack:
        events = _events_in(path.parent)
        if events is not None:
            stack.callback(os.close, events)
        while not path.exists():  # asked after the watch has begun, so that no file is missed
            for readable in select.select([] if events is None else [events], [], [], _LOOK_AGAIN_S)[0]:
                os.read(readable, 1 << 16)


def _events_in(folder: Path) -> int | None:
    """A descriptor that is readable when a file has appeared in the folder; None if it can't be watched."""
    libc = ctypes.CDLL(None)
    events: int = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if events < 0:
        return None
    if libc.inotify_add_watch(events, os.fsencode(folder), _CREATED | _MOVED_TO) < 0:  # there is no such folder yet
        os.close(events)
        return None
    return events
