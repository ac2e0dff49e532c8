"""The process-wide default member: what hvd.init() makes, hvd.shutdown() ends and every other call looks up.

Several contexts can live in one process (epoch.begin makes them); this module only remembers the one that the public
API means, ends it at exit, and keeps it away from forked children, which only know their parent's place in it. What
happens when a world begins and ends stands in epoch.py.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from horovod.base.errors import EngineCode, TrainingCode, WorldCode, coded, without_code
from horovod.base.settings import SETTINGS, Settings, resolve, unread
from horovod.base.telemetry import otel, tracing
from horovod.worker.runtime import logs, parentage
from horovod.worker.runtime.epoch import Epochs
from horovod.worker.runtime.errors import JobDoneError, MemberLostError, StartError, StateLostError, print_as_a_sentence
from horovod.worker.runtime.formation import Context
from horovod.worker.runtime.host import check_loopback
from horovod.worker.runtime.parentage import Facts
from horovod.worker.runtime.plan import without_gloo
from horovod.worker.runtime.world import OnWorldChange, WorldChange

if TYPE_CHECKING:
    from horovod.worker.runtime.past_world import PastWorld
    from horovod.worker.runtime.session import Session
from horovod.worker.runtime.world import World

__all__ = [
    "Context",
    "MemberLostError",
    "StartError",
    "current",
    "init",
    "is_initialized",
    "is_member",
    "place",
    "shutdown",
]

NOT_INITIALIZED = coded(TrainingCode.NOT_INITIALIZED, "Horovod has not been initialized; use hvd.init().")

log = logging.getLogger(__name__)

NOTED_SECONDS = 2.0  # seconds for the coordinator to note what was done; a store that takes no writes is not waited for

_context: Context | None = None
_lock = threading.RLock()
_hooks_registered = False
_own: Facts | None = None  # facts about this process while it is a member
# Of the member that is this process's parent, and the process that asked; (pid, None): it has none.
_parent: tuple[int, Facts | None] | None = None
_is_forked = False  # whether this process has its parent's memory, and not only what the parent told
# This process was a member, or has called shutdown(): its parent's world does not matter to it any more.
_is_on_its_own = False
_told: set[str] = set()  # sentences on settings without effect; guarded by _lock
_session_pid: int | None = None  # the process that has used gRPC, which does not survive a fork
_end_tracing: Callable[[], None] | None = None
_change_listeners: list[OnWorldChange] = []  # grows only


def _tell_of_change(change: WorldChange) -> None:
    for listener in _change_listeners:
        listener(change)


_epochs = Epochs(_tell_of_change)  # epochs of this process; a forked child was in none


def init(
    process_sets: Sequence[Sequence[int]] = (),
    *,
    joined: Callable[[Settings], AbstractContextManager[Settings]] = contextlib.nullcontext,
    **explicit: Any,
) -> Context:
    """Joins a world; names and values as in horovod.base.settings, None for what the environment decides.

    process_sets: the ranks of the process sets that are formed at once, the same on all ranks.
    joined: what completes the settings, and is left when the world stands or can't; ValueError as below.

    Does nothing when this process is a member already. ValueError ("Horovod initialization failed. ...") otherwise says
    what is wrong.
    """
    global _context
    with _lock:
        if _context is not None:
            return _context
        try:
            settings = resolve(explicit=explicit)
            logs.begin(settings)
            _refuse_a_child(settings)
            asked = settings
            parentage.withdraw()
            with joined(settings) as settings:
                _context = _join(settings, process_sets)
            if settings.coordinator is None:
                log.info("This process is a world of one: no coordinator is given.")
            _tell_children(_context.world, asked, alone=settings.coordinator is None)
            if _context.world.rank == 0:
                _tell_unheeded(settings)
        except JobDoneError as done:
            # Of a process that no launcher has started, nobody else would say why it has ended.
            log.log(logging.INFO if settings.incarnation else logging.WARNING, "%s", done)
            raise
        except StateLostError as lost:
            log.error("%s", lost)
            raise StateLostError(f"Horovod initialization failed. {lost}") from lost
        except ValueError as error:
            print_as_a_sentence()
            kind = MemberLostError if isinstance(error, MemberLostError) else StartError
            raise kind(f"Horovod initialization failed. {error}") from error
        return _context


def _join(settings: Settings, process_sets: Sequence[Sequence[int]]) -> Context:
    global _session_pid
    logs.know_rank(settings.rank)
    if settings.coordinator is not None:
        if _session_pid not in (None, os.getpid()):
            raise StartError(_forked(_session_pid))
        check_loopback(settings.coordinator)
        _session_pid = os.getpid()
    _register_hooks()
    log.debug("Settings: %s.", _in_words(settings))
    _begin_tracing()
    with tracing.span("horovod.init", job=settings.job, pid=os.getpid()):
        return _epochs.begin(settings, process_sets)


def _begin_tracing() -> None:
    """Once in a process; its end is at_exit's."""
    global _end_tracing
    if _end_tracing is None:
        _end_tracing = otel.start("horovod-rank")


def when_world_changes(listener: OnWorldChange) -> None:
    """From now on `listener` is called, by another thread, when processes wait to be taken into the world that this
    process is in, or members of it are to leave: all are to leave it together, and those that stay call init() again.
    """
    _change_listeners.append(listener)


def say_leaving(reason: str) -> None:
    """Tells the others that this process leaves the elastic world that it is in for good, at the next commit."""
    context = _context
    if context is not None and context.session is not None:
        context.session.member.say_leaving(reason)


def hold_state(commits: int) -> None:
    """The state of this process was made equal on all ranks of an elastic world, and holds so many commits."""
    context, last = _context, _epochs.holding
    if context is None or last is None or not context.is_elastic:
        return
    has_commits = context.session is not None and context.session.member.has_commits
    last.commits, last.state_epoch = max(commits, int(has_commits)), context.world.epoch


def hold_commits(commits: int) -> None:
    """The state of this process holds so many commits."""
    if (last := _epochs.holding) is not None:
        last.commits = commits


def say_work(*, committed: bool = False, done: bool | None = None) -> str:
    """Tells the coordinator of an elastic job what this process has done of its work. Returns once that is noted, but
    within NOTED_SECONDS: why this process is not in its world any more, or "".
    """
    context = _context
    if context is not None and context.session is not None and context.is_elastic:
        return context.session.member.say_work(committed=committed, done=done, wait_seconds=NOTED_SECONDS)
    return ""


def shutdown(reason: str = "it called hvd.shutdown()", *, returns: bool = False, failed: bool = False) -> None:
    """Leaves the world; nothing happens when this process is in none.

    returns: to join the next one at once. failed: the program has ended with an error.
    """
    global _context
    with _lock:
        context, _context = _context, None
        if context is not None or parent() is not None:
            _let_go()
        if context is not None:
            _epochs.end(context, reason, returns=returns, failed=failed)


def last_world() -> PastWorld | None:
    """The last world in which this process was, or is; None where it was in none of a coordinator."""
    return _epochs.last


def is_initialized() -> bool:
    """Whether this process is in a world: after hvd.init() and before hvd.shutdown().

    True in the children of such a process too (workers of a DataLoader, os.fork, subprocesses): they may ask for the
    rank and size that it had when they began, and run no collectives.

    >>> hvd.is_initialized()
    True
    """
    return _context is not None or parent() is not None


def is_member() -> bool:
    """Whether this process itself is in a world; then there is a context."""
    return _context is not None


def place() -> World | Facts:
    """This process's place in its world; in a child of a member, the member's. ValueError when there is none."""
    context = _context
    if context is not None:
        return context.world
    if (facts := parent()) is None:
        raise ValueError(NOT_INITIALIZED)
    return facts


def parent() -> Facts | None:
    """Of the member that started this process, or one of its ancestors; None: no member did, or this one has left."""
    global _parent
    if _is_on_its_own:
        return None
    if _parent is None or not (_is_forked or _parent[0] == os.getpid()):
        _parent = os.getpid(), parentage.inherited()
    return _parent[1]


def current() -> Context:
    """The context of this process. ValueError when there is none."""
    context = _context
    if context is None:
        raise ValueError(_why_not_initialized())
    return context


def _why_not_initialized() -> str:
    facts = parent()
    if facts is None:
        return NOT_INITIALIZED
    may = "A child may ask for its parent's rank and size; call everything else in the process that called hvd.init()."
    if _is_forked:
        return coded(
            EngineCode.FORKED_CHILD,
            f"This process (pid {os.getpid()}) is a forked child of process {facts.pid}, rank {facts.rank}, which "
            f"called hvd.init(); a world cannot be used from a forked child. {may}",
        )
    return coded(
        WorldCode.CHILD_OF_RANK,
        f"This process (pid {os.getpid()}) is a child of {facts.whose()}, which called hvd.init(); a world cannot be "
        f"used from a child. {may} A program that is to have a world of its own calls hvd.init() first, whatever "
        "hvd.is_initialized() says.",
    )


def _refuse_a_child(settings: Settings) -> None:
    """StartError where this process is the child of a rank and would be a second process of that rank."""
    facts = parent()
    if facts is None or facts.alone or facts.asked != parentage.asked_for(settings):
        return
    if _is_forked:
        raise StartError(_forked(facts.pid))
    raise StartError(
        coded(
            WorldCode.CHILD_OF_RANK,
            f"This process (pid {os.getpid()}) is a child of {facts.whose()}, which is in the world of this job "
            "already, and can't join that world again. If a DataLoader or multiprocessing started it, it runs the main "
            'script again: put the body of the script, with hvd.init(), under `if __name__ == "__main__":`; the child '
            "can read its parent's rank and size without hvd.init(). If it is an independent program, start it with "
            "horovodrun; or, for a world of one, without HOROVOD_COORDINATOR, HOROVOD_RANK and HOROVOD_SIZE, and with "
            "HOROVOD_CLUSTER=none.",
        )
    )


def _forked(parent_pid: int) -> str:
    return coded(
        EngineCode.FORKED_CHILD,
        f"This process (pid {os.getpid()}) is a forked child of process {parent_pid}, which called hvd.init(), and "
        "such a child cannot join a world. Start processes with the 'spawn' method of multiprocessing, or call "
        "hvd.init() in the child only.",
    )


def _tell_children(world: World, asked: Settings, *, alone: bool) -> None:
    global _own, _is_forked, _is_on_its_own
    _is_forked, _is_on_its_own = False, True
    _own = parentage.facts_of(world, asked, alone=alone)
    parentage.publish(_own)


def _let_go() -> None:
    """From now on neither this process nor its children know of a world."""
    global _own, _is_forked, _is_on_its_own
    _own, _is_forked, _is_on_its_own = None, False, True
    parentage.withdraw()


def _tell_unheeded(settings: Settings) -> None:
    """One line, once in a process, for each setting that the user gave, or meant to give, and that nothing acts on."""
    unheeded = [setting.unheeded(getattr(settings, setting.name)) for setting in SETTINGS]
    for sentence in [*unheeded, without_gloo(settings), *unread(os.environ)]:
        if sentence and sentence not in _told:
            _told.add(sentence)
            log.warning("%s", sentence)


def _in_words(settings: Settings) -> str:
    """The settings that are not as they are by default."""
    changed = [row for row in SETTINGS if getattr(settings, row.name) != row.default]
    shown = (f"{row.env}={'(secret)' if row.secret else getattr(settings, row.name)}" for row in changed)
    return ", ".join(shown) or "all as by default"


# -- the end of the process and forks ----------------------------------------------------------------------------------
def _register_hooks() -> None:
    global _hooks_registered
    if not _hooks_registered:
        _hooks_registered = True
        atexit.register(at_exit)
        os.register_at_fork(after_in_child=_after_fork)


def at_exit() -> None:
    """Leaves the world when the program has ended. Idempotent."""
    try:
        _leave_at_exit()
        _epochs.let_go()
    finally:
        if _end_tracing is not None:
            _end_tracing()


def _leave_at_exit() -> None:
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1"):
        shutdown("its program ended")
    else:
        text = without_code(error).strip().split("\n", 1)[0][:200]
        shutdown(f"its program ended with {type(error).__name__}{': ' + text if text else ''}", failed=True)


def _after_fork() -> None:
    """In the child: forget the parent's world without a word to anyone, but for the parent's place in it."""
    global _context, _lock, _own, _parent, _is_forked, _is_on_its_own, _epochs, _end_tracing
    _end_tracing = None  # in a forked child the exporter's threads do not exist
    tracing.install(None)
    _lock = threading.RLock()
    between_worlds = _epochs.after_fork()
    _epochs = Epochs(_tell_of_change)
    context, _context = _context, None
    session, inodes = (between_worlds, frozenset()) if context is None else (context.session, context.socket_inodes)
    if context is not None:
        _parent = os.getpid(), _own
        _own, _is_forked, _is_on_its_own = None, True, False
    # The engine and the channel have threads that do not exist here, so their destructors must never run.
    for one in (context, session):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
    with contextlib.suppress(Exception):
        if context is not None:
            context.timeline.forget()
        if context is not None or session is not None:
            _close_connections(session, inodes)


def _close_connections(session: Session | None, inodes: frozenset[int]) -> None:
    """Closes this child's copies of the parent's connections; otherwise peers would not notice that the parent died.

    Closing a copy does not end the connection. The gRPC channel's sockets are found by where they lead to.
    """
    import socket
    import stat

    coordinators = {*session.streams.addresses, session.coordinators.relay} if session else set()
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            if status.st_ino in inodes:
                os.close(fd)
                continue
            with socket.socket(fileno=os.dup(fd)) as copy:
                peer = copy.getpeername()
            if isinstance(peer, tuple):
                peer = (peer[0].removeprefix("::ffff:"), peer[1])
            if peer in coordinators:
                os.close(fd)
