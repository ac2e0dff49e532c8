"""Event loops in a process that has several of them, as a launcher with a coordinator of its own."""

import asyncio
from typing import Any


def quiet(loop: asyncio.AbstractEventLoop) -> None:
    """The loop does not report wake-ups that were meant for another one.

    grpcio, up to version 1.78 at least, wakes all loops of a process when a call of any of them has news, by one
    pipe; each that finds it empty reports a BlockingIOError, with a traceback on stderr. Nothing is lost by that.
    """
    loop.set_exception_handler(_handle)


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    is_wakeup = "PollerCompletionQueue" in str(context.get("message"))
    if not (is_wakeup and isinstance(context.get("exception"), BlockingIOError)):
        loop.default_exception_handler(context)
