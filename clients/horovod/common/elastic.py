"""Elastic training without a framework: state that survives failures, and the loop around the training function.

    run_fn(func, reset)(state):

      +-> state.sync() -> func(state) -----------------------------------------> its result
      |                      | HorovodInternalError     state.restore()
      |                      | HostsUpdatedInterrupt    nothing is undone
      |                      v
      +-- state.on_reset() <- reset(): leave the world and join the next one

A process that is new in a world calls sync() first as well, so all ranks begin a world with the same collectives.
No rank skips it: `HostsUpdatedInterrupt.skip_sync` says what rank 0 knew of the hosts when it was interrupted, but a
process may have come since, and it would wait in sync() for ranks that train already. In vain, a sync costs some
broadcasts.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from enum import IntFlag
from typing import Any, Final

from horovod.base.errors import TrainingCode, coded
from horovod.base.words import plural
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.worker.runtime.context import current, is_initialized, when_newcomers_wait

__all__ = ["HostUpdateResult", "NotificationManager", "ObjectState", "State", "notification_manager", "run_fn"]

log = logging.getLogger(__name__)

UNTAKEN_SECONDS = 60.0  # for so long newcomers may wait for the next commit before somebody says so


class HostUpdateResult(IntFlag):
    """What happened to the set of hosts: some came, some went, or both (`mixed`)."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class State:
    """What training continues from. Subclasses define `save`, `restore` and `sync`.

    Args:
        bcast_object: sends rank 0's object to all ranks: `bcast_object(obj, root_rank=0)`.
        get_rank: this process's rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        # Filled by the thread that delivers notifications, emptied by the one that trains.
        self._host_messages: queue.SimpleQueue[tuple[float, HostUpdateResult]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._commits = 0  # in the training so far, of which other processes may have done some

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Functions to call, in this order, in each new world before `sync`; for example to adapt the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """In a new world: what was said about the hosts of the old one no longer counts."""
        self._latest_update()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Notes that hosts came or went, for the next `check_host_updates`. Called from any thread."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """`save`, then `check_host_updates`. A collective: all ranks call it equally often.

        Raises what these two raise.
        """
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises on all ranks together when rank 0 was told that hosts came or went. A collective.

        Raises:
            HostsUpdatedInterrupt: they did. `skip_sync` is true when hosts only went.
            HorovodInternalError: a rank was lost.
        """
        # Rank 0's queue decides. Others may have been told earlier or later, and all must leave the world together.
        updated, update_res = self._bcast_object(self._latest_update())
        if updated:
            raise HostsUpdatedInterrupt(update_res == HostUpdateResult.removed)

    def _latest_update(self) -> tuple[bool, HostUpdateResult]:
        """Empties the queue: whether it held newer news than the last call found, and what happened in all of it."""
        updated, all_updates = False, HostUpdateResult.no_update
        while True:
            try:
                timestamp, update_res = self._host_messages.get_nowait()
            except queue.Empty:
                return updated, all_updates
            if timestamp > self._last_updated_timestamp:
                self._last_updated_timestamp = timestamp
                updated = True
                all_updates |= update_res

    def save(self) -> None:
        """Remembers the state in memory."""
        raise NotImplementedError(f"{type(self).__name__} must define save().")

    def restore(self) -> None:
        """Goes back to what was saved last."""
        raise NotImplementedError(f"{type(self).__name__} must define restore().")

    def sync(self) -> None:
        """Makes the state equal on all ranks. A collective."""
        raise NotImplementedError(f"{type(self).__name__} must define sync().")

    def _settle(self) -> None:
        """Waits until the values are what they are to be, where a device still works on them.

        Raises HorovodInternalError where they can't be: a rank was lost, and what was queued behind a collective on a
        GPU went on without its result. Nothing is to be waited for by default.
        """

    def reset(self) -> None:
        """Adapts what depends on the world (its size, this rank) to a new one. Nothing does by default."""


class ObjectState(State):
    """Plain values as attributes: `ObjectState(bcast_object, get_rank, epoch=0)` has `state.epoch`.

    Only names given here are saved and sent. Values must be picklable and are copied deeply when saved and restored, so
    that changing a saved list in place does not change what `restore` goes back to.

    `sync` sends the values as they are on its source, not as they were saved last (in which Horovod 0.28 differs): so
    counters and weights stay together after an interrupt without a commit. What it received is saved, so that
    `restore` never goes back behind a sync.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._synced = False  # whether this process has the state of a training, not only its own beginning
        self._source = 0
        self._source_commits = 0
        self._saved_state: dict[str, Any] = dict(kwargs)
        self.__dict__.update(kwargs)
        ObjectState.save(self)

    def save(self) -> None:
        self._saved_state = self._copied({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        self.__dict__.update(self._copied(self._saved_state))

    def sync(self) -> None:
        source = self._source
        live = {name: getattr(self, name) for name in self._saved_state} if self._rank() == source else None
        received = self._bcast_object(live, root_rank=source)
        self.__dict__.update(received)
        self._saved_state = self._copied(received)
        self._synced, self._commits = True, max(self._commits, self._source_commits)

    def _choose_source(self, allgather_object: Callable[[Any, str], list[Any]], names: Iterable[str] = ()) -> None:
        """Finds the rank from which `sync` sends, the same on all ranks. A collective of that function.

        A process that is new in a training that others were in already is never asked. Of the others, the one that has
        committed most often counts: a rank may have been lost when some of them had already saved the last commit.
        Without others, it is rank 0. names: of what the state holds beside plain values.

        Raises:
            ValueError: on all ranks, when the states hold different names.
        """
        mine = (self._synced, self._commits, sorted({*self._saved_state, *names}))
        everyone = allgather_object(mine, "elastic.synced")
        first = everyone[0][2]
        for other, (_, _, theirs) in enumerate(everyone):
            if theirs != first:
                only = sorted(set(theirs).symmetric_difference(first))
                sentence = (
                    f"The elastic states of rank 0 and rank {other} hold different names: {', '.join(only)} is not in "
                    "both. Give the state the same names on all ranks."
                )
                raise ValueError(coded(TrainingCode.DIFFERENT_STATES, sentence))
        progress = [(synced, commits) for synced, commits, _ in everyone]
        most = max(progress)
        self._source = progress.index(most) if most[0] else 0
        self._source_commits = progress[self._source][1]

    def _kept(self) -> Iterable[Any]:
        """Objects that copies of the values share with the values, because they must not be copied."""
        return ()

    def _copied(self, values: dict[str, Any]) -> dict[str, Any]:
        # One copy of all values: an object that two attributes share is shared in the copy as well.
        memo: dict[int, Any] = {id(kept): kept for kept in self._kept()}
        copies = {}
        for name, value in values.items():
            try:
                copies[name] = copy.deepcopy(value, memo)
            except Exception as error:  # of any class: objects define how they are copied
                raise ValueError(
                    coded(
                        TrainingCode.UNCOPYABLE_STATE,
                        f"{type(self).__name__} can't save its attribute {name!r}, a {type(value).__name__} "
                        f"({type(error).__name__}: {error}). Keep what can be copied in it, for example a state_dict.",
                    )
                ) from error
        return copies


class NotificationManager:
    """Passes news about hosts on to the states that are in training.

    The news come from the coordinator, when processes wait to be taken into an elastic world, and from code that knows
    and calls `handle_hosts_updated`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields; not held while listeners are called
        self._awaiting_epoch = 0  # the epoch of the last world to which newcomers were announced
        self._latest = 0.0
        self._listeners: list[State] = []

    def register_listener(self, listener: State) -> None:
        """From now on `listener` is called with all news."""
        with self._lock:
            self._listeners.append(listener)
        self.tell_again(listener)

    def remove_listener(self, listener: State) -> None:
        """Undoes one `register_listener`; does nothing for a listener that is not registered."""
        with self._lock:
            for index, known in enumerate(self._listeners):
                if known is listener:
                    del self._listeners[index]
                    return

    def newcomers_wait(self, epoch: int, count: int) -> None:
        """So many processes wait to be taken into the world of this epoch, which this process is in or is to enter."""
        with self._lock:
            self._awaiting_epoch = epoch
        self._watch(epoch, count)
        self.handle_hosts_updated(self._now(), HostUpdateResult.added)

    def _watch(self, epoch: int, count: int) -> None:
        """Says so when nothing comes of it: a script that never commits would keep them waiting in silence."""
        try:
            context = current()
        except ValueError:  # this process leaves its world just now, or has not entered it yet
            return
        if context.world.epoch != epoch:
            return

        def warn() -> None:
            log.warning(
                "%s for %g s to be taken into this world, and this process has called neither state.commit() nor "
                "state.check_host_updates() meanwhile. Call one of them on all ranks every few batches.",
                f"{plural(count, 'further process')} {'has' if count == 1 else 'have'} waited",
                UNTAKEN_SECONDS,
            )

        timer = threading.Timer(UNTAKEN_SECONDS, warn)
        timer.daemon = True
        timer.start()
        context.when_closed.append(timer.cancel)

    def tell_again(self, listener: State) -> None:
        """Tells this listener once more that newcomers wait, if they do. Newcomers are announced once, which may have
        been before this listener was registered, or while its on_reset() dropped the news of an earlier world.
        """
        with self._lock:
            epoch = self._awaiting_epoch
        if epoch and is_initialized() and current().world.epoch == epoch:
            listener.on_hosts_updated(self._now(), HostUpdateResult.added)

    def _now(self) -> float:
        """Later than all before, also when the clock was set back: a state takes no notice of older news."""
        with self._lock:
            self._latest = max(time.time(), math.nextafter(self._latest, math.inf))
            return self._latest

    def handle_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Tells all listeners; those of rank 0 interrupt all ranks at their next commit() or check_host_updates().

        Args:
            timestamp: when it happened, in seconds; what is not newer than the last news is ignored.
            update_res: what happened.
        """
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager: Final = NotificationManager()
when_newcomers_wait(notification_manager.newcomers_wait)


def check_results() -> None:
    """Raises HorovodInternalError where collectives on a GPU may have ended without their results.

    Call it once the GPU has nothing left to do.
    """
    if is_initialized():
        current().engine.check_results()


def _settled(state: State, result: Any = None) -> Any:
    """`result`, once `state` is what the steps that were queued make of it."""
    if isinstance(state, State):  # a script may have its own class
        state._settle()
    return result


def _go_back(state: State, error: HorovodInternalError) -> None:
    log.warning("Going back to the last commit and joining the next world, because: %s", error)
    state.restore()


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """`func(state, ...)` in the loop that this module draws; `reset` leaves the world and joins the next one.

    Other exceptions than the two of the loop propagate, those of `reset` too. Nothing limits how often the loop goes
    round: an error that the script itself makes again in each world is logged each time.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        is_new_world = False
        notification_manager.register_listener(state)
        try:
            while True:
                try:
                    if is_new_world:
                        state.on_reset()
                        notification_manager.tell_again(state)
                    state.sync()
                    return _settled(state, func(state, *args, **kwargs))
                except HorovodInternalError as error:
                    _go_back(state, error)
                except HostsUpdatedInterrupt:
                    log.info("Joining the next world, because hosts came or went.")
                    try:
                        _settled(state)
                    except HorovodInternalError as error:
                        _go_back(state, error)
                reset()
                is_new_world = True
        finally:
            notification_manager.remove_listener(state)

    return wrapper
