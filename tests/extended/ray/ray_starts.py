"""Starts of Ray that may be slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
TRIES = 3
SLOW = ("timed out during startup", "Timed out waiting for file")


def started(start: Callable[[], T]) -> T:
    """What `start` returns. Ray gives each of its programs up to 30 s to start, which no setting changes, and which are
    too few on a busy machine. Then all is tried again: a node that has only been late would be one too many.
    """
    for _ in range(TRIES - 1):
        try:
            return start()
        except Exception as error:
            if not any(words in str(error) for words in SLOW):
                raise
    return start()
