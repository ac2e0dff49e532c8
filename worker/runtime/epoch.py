"""Where one epoch of a process ends, and where the next one begins.

A process is in one world after another; each is an epoch of its job. An epoch begins (`begin`) in this order:

1. The settings, and the process sets to begin with, are checked.
2. The process joins (formation.py). It proves which rank of the last world it was, if it was in one of this coordinator
   and job, and gets that rank again.
3. The new world is remembered as the last one as soon as it stands, so that a start that fails later can join the
   next world with this one's proof. A world that not all of its members heard of is left, and another one joined.
4. Peers connect, the engine and the negotiator start, the timeline begins, the process sets are formed.
5. Native operations of frameworks get the engine, and lines of the log the rank and the epoch (`Epochs.begin`).

It ends (`end`) in this order, after context.py has let go of the world, so that no new call finds it:

1. Native operations lose the engine (`Epochs.end`).
2. A peer that the data plane found lost is reported, before the goodbye ends the stream.
3. The engine closes: operations that run fail with a sentence, and no other begins. Its process sets go with it. It
   gives away the connections that the next epoch may use.
4. The timeline is written to its end, now that the last operations have ended.
5. The negotiator ends its stream; then the session says goodbye to the coordinator and ends the channel. Where this
   process joins again, the channel ends when it has: the coordinator sees by its end that the process has ended.
6. What holds the world or its engine, like an optimizer that has taken steps in it, lets go of it.
7. Lines of the log lose rank and epoch.

Only the last world (past_world.py) stays for the next epoch and, where this process joins again, the session and
connections to others (past_world.py). Ids of process sets mean nothing in another one: who has given them to users
forgets them after `end` (process_sets.forget_all of the clients). No message of an earlier epoch is taken for one of
the next: engine and streams carry its number, and what is left on a connection is thrown away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from horovod.base.errors import without_code
from horovod.base.settings import Settings
from horovod.base.words import capitalized, plural, shortened
from horovod.worker.runtime import logs
from horovod.worker.runtime.call_sites import OWN_NAME, CheckedEngine
from horovod.worker.runtime.errors import FEWER_BATCHES, MemberLostError, StartError, WorldNeverStoodError
from horovod.worker.runtime.formation import Context, form, form_alone
from horovod.worker.runtime.plan import usable
from horovod.worker.runtime.world import OnWorldChange, ignore_changes

if TYPE_CHECKING:
    from horovod._core import Engine
    from horovod.worker.runtime.past_world import LastWorld, PastWorld
    from horovod.worker.runtime.session import Session

log = logging.getLogger(__name__)

_MAX_KINDS = 4  # kinds of unnamed operations that the reason of a goodbye names


def begin(
    settings: Settings,
    process_sets: Sequence[Sequence[int]] = (),
    last: LastWorld | None = None,
    on_change: OnWorldChange = ignore_changes,
) -> Context:
    """Blocks until the world stands and this process is connected to all of it; StartError or ValueError otherwise.

    process_sets: ranks of the sets to begin with, equal on all ranks; their ids are 1, 2 and so on. In a world of an
    elastic job that has fewer ranks than they, process_sets.initial_sets says what becomes of them. last: of the world
    that this process was in before, so that it can prove who it was; keeps the new one, also when the start fails
    later."""
    try:
        settings = usable(settings, process_sets)
        alone = settings.coordinator is None
        context = form_alone(settings) if alone else _form(settings, process_sets, last, on_change)
        if last is not None:
            last.let_go()
    except BaseException as error:
        if last is not None and not isinstance(error, MemberLostError):  # after which it joins again
            last.let_go()
        raise
    finally:
        if last is not None:
            last.links.close()
    try:
        context.timeline.start_as_set(context.world.epoch if last is not None and last.returns else None)
    except StartError:
        end(context, "its timeline can't be written", failed=True)
        raise
    if process_sets:
        try:
            context.process_sets.begin_with(process_sets)
        except BaseException as error:
            is_lost = isinstance(error, RuntimeError)
            end(context, "its process sets could not be formed", returns=is_lost and _is_elastic(settings), failed=True)
            if is_lost:
                raise MemberLostError(str(error)) from error
            raise
    return context


def _form(
    settings: Settings,
    process_sets: Sequence[Sequence[int]],
    last: LastWorld | None,
    on_change: OnWorldChange,
) -> Context:
    deadline = _deadline(settings, last)
    while True:
        try:
            return form(settings, process_sets, deadline, last, on_change)
        except MemberLostError as error:
            if not _is_elastic(settings) and not isinstance(error, WorldNeverStoodError):
                raise
            log.info("%s This process joins again.", without_code(error))
            if _is_elastic(settings):  # an attempt of an elastic job may have waited for long
                deadline = _deadline(settings, last)


def _deadline(settings: Settings, last: LastWorld | None) -> float:
    joins_again = _is_elastic(settings) and last is not None and last.is_of(settings.coordinator, settings.job)
    return time.monotonic() + (settings.elastic_timeout_seconds if joins_again else settings.start_timeout_seconds)


def _is_elastic(settings: Settings) -> bool:
    return settings.min_size is not None


def end(
    context: Context,
    reason: str = "",
    *,
    returns: bool = False,
    failed: bool = False,
    last: LastWorld | None = None,
) -> None:
    """Leaves the world in order. Idempotent.

    returns: to join the next one of the job at once. failed: its program has ended with an error. last: gets the
    connections that the next world may use, where this process returns.
    """
    world, engine, session = context.world, context.engine, context.session
    if session is not None and (lost := engine.lost_peer()):
        session.member.report_lost(*lost)  # in case the negotiator has not come to it
    is_done = not returns and not failed
    if is_done and reason:
        reason = f"{reason} {_so_far(engine)}"
    sentence = f"{capitalized(world.label(world.rank))} left the world{': ' + reason if reason else ''}."
    if is_done:
        sentence = f"{sentence} {FEWER_BATCHES}"
    keep = returns and last is not None
    if problem := engine.close(sentence, keep=keep):
        log.warning("%s", problem)
    if last is not None:
        last.links.keep(world, engine.kept_sockets())
    context.timeline.stop()
    if context.negotiator is not None:
        context.negotiator.close()
    if session is not None and last is not None:
        last.returns = returns
        last.leave(session, reason, returns=returns, failed=failed)
    elif session is not None:
        session.close(reason, returns=returns, failed=failed)
    while context.when_closed:
        context.when_closed.pop()()


def _so_far(engine: Engine) -> str:
    """How far a process had come when it left; behind its reason."""
    operations = engine.counters()["agreed"]
    if not operations:
        return "before its first operation"
    lines = engine.last_lines if isinstance(engine, CheckedEngine) else {}
    counts = []
    for (number, kind), count in engine.blocked_report().unnamed.items():
        where = f" in process set {number}" if number else ""
        line = f", the last at {lines[number, kind]}" if (number, kind) in lines else ""
        if kind != OWN_NAME:
            counts.append(f"{count} of {kind}{where}{line}")
    unnamed = f" (without a name: {shortened(counts, _MAX_KINDS)})" if counts else ""
    return f"after {plural(operations, 'operation')}{unnamed}"


class Epochs:
    """The epochs of a process's default member, one at a time. Used under the lock of context.py."""

    def __init__(self, on_change: OnWorldChange) -> None:
        self._on_change = on_change
        self._last: LastWorld | None = None

    def begin(self, settings: Settings, process_sets: Sequence[Sequence[int]]) -> Context:
        if settings.coordinator is not None and self._last is None:
            from horovod.worker.runtime.past_world import LastWorld  # needs protobuf, which a world of one does without

            self._last = LastWorld()
        context = begin(settings, process_sets, self._last, self._on_change)
        _offer_to_c(context)
        if settings.check_call_sites and context.world.size > 1:
            context.engine = cast("Engine", CheckedEngine(context.engine, context.world.rank))
        logs.know_rank(context.world.rank)
        logs.know_world(context.world.job, context.world.epoch)
        return context

    @property
    def holding(self) -> LastWorld | None:
        """Where this process keeps what its next world is to know of it."""
        return self._last

    @property
    def last(self) -> PastWorld | None:
        """The last world that stood; None before the first one of a coordinator."""
        return self._last.world if self._last is not None else None

    def end(self, context: Context, reason: str, *, returns: bool, failed: bool) -> None:
        _offer_to_c(None)
        end(context, reason, returns=returns, failed=failed, last=self._last)
        logs.know_rank(None)
        logs.know_world(context.world.job, None)

    def let_go(self) -> None:
        """This process will be in no other world."""
        if self._last is not None:
            self._last.let_go()

    def after_fork(self) -> Session | None:
        """In the child: lets go of its copies of connections between two worlds; the session's are the caller's."""
        if self._last is None:
            return None
        self._last.links.close_copies()
        return self._last.session


def _offer_to_c(context: Context | None) -> None:
    """Native operations of frameworks reach the engine through a table in C."""
    from horovod._core import set_current_engine

    set_current_engine(context.engine if context is not None else None)
