"""The process-wide default member: what hvd.init() makes, hvd.shutdown() ends and every other call looks up.

Several contexts can live in one process (formation.form makes them); this module only remembers the one that the public
API means, ends it at exit, and keeps it away from forked children.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from horovod.worker.runtime.errors import MemberLostError, StartError, print_as_a_sentence
from horovod.worker.runtime.formation import Context, form
from horovod.worker.settings import Settings, resolve

__all__ = ["Context", "MemberLostError", "StartError", "current", "init", "is_initialized", "shutdown"]

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."

_LOG_LEVELS = {
    "trace": 5,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}

_context: Context | None = None
_lock = threading.RLock()
_hooks_registered = False
_parent_pid: int | None = None  # set in a forked child of an initialized process
_session_pid: int | None = None  # the process that has used gRPC, which does not survive a fork


def init(process_sets: Sequence[Sequence[int]] = (), **explicit: Any) -> Context:
    """Joins a world; names and values as in horovod.worker.settings, None for what the environment decides.

    process_sets: the ranks of the process sets that are formed at once, the same on all ranks.

    Does nothing when this process is a member already. ValueError ("Horovod initialization failed. ...") otherwise says
    what is wrong.
    """
    global _context, _session_pid
    with _lock:
        if _context is not None:
            return _context
        try:
            settings = resolve(explicit=explicit)
            _set_log_level(settings)
            if settings.coordinator is not None:
                if _session_pid not in (None, os.getpid()):
                    raise StartError(
                        f"This process (pid {os.getpid()}) is a forked child of process {_session_pid}, which called "
                        "hvd.init(), and such a child cannot join a world. Start processes with the 'spawn' method of "
                        "multiprocessing, or call hvd.init() in the child only."
                    )
                _session_pid = os.getpid()
            _register_hooks()
            _context = form(settings, process_sets)
        except ValueError as error:
            print_as_a_sentence()
            kind = MemberLostError if isinstance(error, MemberLostError) else StartError
            raise kind(f"Horovod initialization failed. {error}") from error
        return _context


def shutdown(reason: str = "it called hvd.shutdown()") -> None:
    """Leaves the world; nothing happens when this process is in none."""
    global _context
    with _lock:
        context, _context = _context, None
        if context is not None:
            context.close(reason)


def is_initialized() -> bool:
    """Whether this process is in a world: after hvd.init() and before hvd.shutdown(). False in a forked child.

    >>> hvd.is_initialized()
    True
    """
    return _context is not None


def current() -> Context:
    """The context of this process. ValueError when there is none."""
    context = _context
    if context is None:
        raise ValueError(NOT_INITIALIZED + _because_of_fork())
    return context


def _because_of_fork() -> str:
    if _parent_pid is None:
        return ""
    return (
        f" This process (pid {os.getpid()}) is a forked child of process {_parent_pid}, which called hvd.init(); "
        "a world cannot be used from a forked child. Call Horovod in the process that called hvd.init() only."
    )


def _set_log_level(settings: Settings) -> None:
    logger = logging.getLogger("horovod")
    if logger.level == logging.NOTSET:
        logger.setLevel(_LOG_LEVELS[settings.log_level])


# -- the end of the process and forks ----------------------------------------------------------------------------------
def _register_hooks() -> None:
    global _hooks_registered
    if not _hooks_registered:
        _hooks_registered = True
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1"):
        shutdown("its program ended")
    else:
        text = str(error).strip().split("\n", 1)[0][:200]
        shutdown(f"its program ended with {type(error).__name__}{': ' + text if text else ''}")


def _after_fork() -> None:
    """In the child: forget the parent's world without a word to anyone."""
    global _context, _lock, _parent_pid
    _lock = threading.RLock()
    context, _context = _context, None
    if context is None:
        return
    _parent_pid = os.getppid()
    # The engine and the channel have threads that do not exist here, so their destructors must never run.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(context))
    with contextlib.suppress(Exception):
        context.timeline.forget()
        _close_connections(context)


def _close_connections(context: Context) -> None:
    """Closes this child's copies of the parent's connections; otherwise peers would not notice that the parent died.

    Closing a copy does not end the connection. The gRPC channel's sockets are found by where they lead to.
    """
    import socket
    import stat

    coordinators = context.session.addresses if context.session else frozenset()
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            if status.st_ino in context.socket_inodes:
                os.close(fd)
                continue
            with socket.socket(fileno=os.dup(fd)) as copy:
                peer = copy.getpeername()
            if isinstance(peer, tuple) and (peer[0].removeprefix("::ffff:"), peer[1]) in coordinators:
                os.close(fd)
