"""Descriptors 0, 1 and 2 of a program that was started without some of them, as `horovodrun ... 2>&-` does."""

from __future__ import annotations

import os
import sys

_STREAMS = ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w"))


def open_missing_streams() -> None:
    """Opens /dev/null in place of those that are closed. Call it first of all, before this process opens anything.

    Python has None for a stream whose descriptor is closed. The next file or connection would get its number, and what
    this process or a child writes as its output would go there.
    """
    for number, name, mode in _STREAMS:
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
