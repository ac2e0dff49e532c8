"""A thread in one call, for scripts of earlier releases. Only they call it, so it lives here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: Iterable[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Calls `target(*args)` in a thread, which it returns started. silent: its exceptions are not printed."""

    def quietly(*arguments: Any) -> None:
        try:
            target(*arguments)
        except Exception:
            if not silent:
                raise

    thread = threading.Thread(target=quietly, args=tuple(args), name=name, daemon=daemon)
    thread.start()
    return thread
