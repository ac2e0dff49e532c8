"""Elastic training without a framework: state that survives failures, and the loop around the training function.

    run_fn(func, reset)(state):

      +-> state.sync() -> func(state) -----------------------------------------> its result
      |                      | HorovodInternalError     state.restore()
      |                      | HostsUpdatedInterrupt    nothing is undone
      |                      v
      +-- state.on_reset() <- reset(): leave the world and join the next one; or leave for good (departure.py)

A process that is new in a world calls sync() first as well, so all ranks begin a world with the same collectives.
No rank skips it: `HostsUpdatedInterrupt.skip_sync` says what rank 0 knew of the hosts when it was interrupted, but a
process may have come since, and it would wait in sync() for ranks that train already. In vain, a sync costs some
broadcasts.
"""

from __future__ import annotations

import _thread
import contextlib
import copy
import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from horovod.base.errors import OperationCode, SettingCode, TrainingCode, code_of, coded
from horovod.base.words import plural
from horovod.common import optimizer_numbers
from horovod.common.basics import leave_for_good
from horovod.common.departure import EXIT_CODE, departure
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.host_news import Announced, HostMessages, HostUpdateResult
from horovod.common.ops.objects import broadcast_keeping
from horovod.common.state_parts import Parts, contents_of, find_parts, refill
from horovod.worker.runtime.context import current, hold_commits, hold_state, is_member, say_work, when_world_changes
from horovod.worker.runtime.world import WorldChange

__all__ = [
    "HostUpdateResult",
    "NotificationManager",
    "ObjectState",
    "State",
    "leave_at_next_commit",
    "notification_manager",
    "run_fn",
]

log = logging.getLogger(__name__)

WANTED_BACK: Final = "its launcher takes back its place"
VAIN_ROUNDS = 5  # so many rounds in a row without a commit may end with an error that is not the loss of a rank
# Errors that happen to a rank. Other errors of operations are the script's own fault.
_HAPPENS: Final = {OperationCode.PEER_LOST, OperationCode.SHUT_DOWN, OperationCode.STALLED, OperationCode.NO_PROGRESS}
OPTIMIZER: Final = "optimizer"  # the kind of a part that can't be sent to a rank that has none
AWAITED_SECONDS = 30.0  # seconds for which a commit waits for processes that the script has seen coming
UNTAKEN_SECONDS = 60.0  # seconds for which newcomers may wait for the next commit before a warning says so


class State:
    """The state from which training continues after a failure. Subclasses define `save`, `restore` and `sync`.

    Args:
        bcast_object: sends rank 0's object to all ranks: `bcast_object(obj, root_rank=0)`.
        get_rank: this process's rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        self._host_messages = HostMessages()
        self._last_updated_timestamp = 0.0
        self._commits = 0  # commits of the training so far; other processes may have done some of them

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Functions to call, in this order, in each new world before `sync`; for example to adapt the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called in a new world. News about the hosts of the old world is dropped."""
        self._host_messages.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Notes that hosts came or went, for the next `check_host_updates`. Called from any thread.

        New hosts are reported twice: when their processes are being started (`timestamp` is then an `Announced`), and
        when these processes have joined. After the second report the ranks form a new world.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """`save`, then `check_host_updates`. A collective: all ranks call it equally often.

        Raises what these two raise.
        """
        self.save()
        self._count_commit()
        self.check_host_updates()

    def _count_commit(self) -> None:
        self._commits += 1
        _work.committed(self._commits)

    def check_host_updates(self) -> None:
        """Raises on all ranks together when rank 0 was told that hosts came or went. A collective.

        Raises:
            HostsUpdatedInterrupt: they did. `skip_sync` is true when hosts only went.
            HorovodInternalError: a rank was lost.
        """
        updated, update_res = self._bcast_object(self._news())
        if updated:
            raise HostsUpdatedInterrupt(update_res == HostUpdateResult.removed)

    def _news(self) -> tuple[bool, HostUpdateResult]:
        """Whether hosts came or went since the last call. Rank 0's decides: others may have been told earlier or later,
        and all must leave the world together.
        """
        if self._rank() == 0 and not self._host_messages.await_announced(AWAITED_SECONDS):
            log.warning(
                "New hosts were announced and the script checked for them, but their processes have not "
                "joined within %g s. Training continues, and they may still join later.",
                AWAITED_SECONDS,
            )
        return self._latest_update()

    def _latest_update(self) -> tuple[bool, HostUpdateResult]:
        """Empties the queue: whether it held newer news than the last call found, and what happened in all of it. Where
        processes were only announced, it stays as it is.
        """
        updated, all_updates = False, HostUpdateResult.no_update
        for timestamp, update_res in self._host_messages.take():
            if timestamp > self._last_updated_timestamp:
                self._last_updated_timestamp = timestamp
                updated = True
                all_updates |= update_res
        return updated, all_updates

    def save(self) -> None:
        """Remembers the state in memory."""
        raise NotImplementedError(f"{type(self).__name__} must define save().")

    def restore(self) -> None:
        """Goes back to the state that was saved last."""
        raise NotImplementedError(f"{type(self).__name__} must define restore().")

    def sync(self) -> None:
        """Makes the state equal on all ranks. A collective."""
        raise NotImplementedError(f"{type(self).__name__} must define sync().")

    def _settle(self) -> None:
        """Waits until a device has computed the values of this state, where some are on a device.

        Raises HorovodInternalError where the values are wrong: a rank was lost, and the device computed on without the
        result of a collective. By default no value is on a device, and this does nothing.
        """

    def _optimizers(self) -> Iterable[optimizer_numbers.Made]:
        """Of the distributed optimizers in this state, in one order on all ranks. There are none by default."""
        return ()

    def reset(self) -> None:
        """Adapts what depends on the world (its size, this rank) to a new one. Nothing does by default."""


class ObjectState(State):
    """Plain values as attributes: `ObjectState(bcast_object, get_rank, epoch=0)` has `state.epoch`.

    Only names given here are saved and sent. Values must be picklable and are copied deeply when saved and restored, so
    that changing a list in place does not change its saved copy. Subclasses say which values are
    parts, such as models: these stay the objects that they are, also inside lists, dicts and objects (state_parts.py).

    `sync` sends the present values of its source. (Horovod 0.28 sent the values saved last.) So counters and weights
    stay together after an interrupt without a commit. `sync` also saves the received values, so that `restore` never
    goes back to a state before the sync.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._synced = False  # whether this process has the state of a training, not only its own beginning
        self._source = 0
        self._source_commits = 0
        self._parts = Parts()  # the parts at the last save
        self._agreed: dict[str, Any] = {}  # by path, in one order: objects that stay in the next sync, on all ranks
        self._told_of: set[str] = set()  # paths
        self._left_out: list[weakref.ref[Any]] | None = None  # optimizers that no part holds; None: not looked for yet
        self._saved_state: dict[str, Any] = dict(kwargs)
        self._saved_contents: dict[str, Any] = {}  # path of a holder -> its contents at the last save
        self.__dict__.update(kwargs)
        ObjectState.save(self)

    def commit(self) -> None:
        self._warn_of_optimizers_left_out()
        super().commit()

    def save(self) -> None:
        self._take_parts(self._find_parts())
        contents = {path: contents_of(holder) for path, holder in self._parts.holders.items()}
        self._save_copies(self._live(), contents)

    def restore(self) -> None:
        values, contents = self._copied(self._saved_state, self._saved_contents)
        self._put(values, contents, self._parts.holders)

    def sync(self) -> None:
        source = self._source
        live = None
        if self._rank() == source:
            holders = self._find_parts().holders
            live = (self._live(), {path: contents_of(one) for path, one in holders.items() if path in self._agreed})
        values, contents = self._broadcast_keeping(live, source, self._kept_objects(self._agreed))
        self._put(values, contents, self._agreed)
        self._synced, self._commits = True, max(self._commits, self._source_commits)
        ObjectState.save(self)

    def _broadcast_keeping(self, obj: Any, root_rank: int, kept: Sequence[Any]) -> Any:
        return broadcast_keeping(obj, root_rank, kept) if kept else self._bcast_object(obj, root_rank=root_rank)

    def _live(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _put(self, values: dict[str, Any], contents: dict[str, Any], holders: Mapping[str, Any]) -> None:
        self.__dict__.update(values)
        for path, inside in contents.items():
            refill(holders[path], inside)

    def _save_copies(self, values: dict[str, Any], contents: dict[str, Any]) -> None:
        self._saved_state, self._saved_contents = self._copied(values, contents)
        paths = {*self._parts.found, *self._parts.in_sets}
        if paths <= self._told_of:
            return
        self._told_of |= paths
        name = type(self).__name__
        for path, one in self._parts.in_sets.items():
            log.warning("%s does not keep the %s in the set %s. Put it into a list.", name, type(one).__name__, path)
        known = {id(one) for one in self._kept()}
        saved = dict(self._saved_state)
        for path, (items, attributes) in self._saved_contents.items():
            saved |= {path: items} | {f"{path}.{attribute}": value for attribute, value in attributes.items()}
        copied = find_parts(saved, self._kind_of)
        for path, one in copied.found.items():
            if id(one) not in known:
                log.warning(
                    "%s keeps a copy of %s, a %s, instead of the object that the script trains, because the "
                    "object that holds it defines its own copying (__deepcopy__ or __getstate__). Pass the %s "
                    "to the state as a named argument.",
                    *(name, path, type(one).__name__, type(one).__name__),
                )

    def _warn_of_optimizers_left_out(self) -> None:
        """Warns once of each optimizer that trains this state's weights and is not part of the state itself.

        A newcomer would begin without its momentum and the like, and the ranks' weights would part.
        """
        if self._left_out is None:
            self._left_out = [weakref.ref(one) for one in self._optimizers_left_out()]
        for reference in [*self._left_out]:
            optimizer = reference()
            remembers = [] if optimizer is None else self._memory_of(optimizer)
            if remembers is not None:
                self._left_out.remove(reference)
            if remembers and self._rank() == 0:
                log.warning(
                    "%s keeps weights that an optimizer trains, but not the state of that optimizer, a %s "
                    "(%s). Ranks that join later would start without this state, and their weights would "
                    "diverge. Pass the optimizer to the state too: %s(..., optimizer=optimizer).",
                    *(type(self).__name__, type(optimizer).__name__, ", ".join(remembers), type(self).__name__),
                )

    def _optimizers_left_out(self) -> Iterable[Any]:
        """The optimizers of this process that train this state's weights and are not part of the state."""
        return ()

    def _memory_of(self, optimizer: Any) -> list[str] | None:
        """Names of what such an optimizer remembers from step to step, and nothing in this state holds; None if it does
        not remember anything yet.
        """
        return None

    def _kind_of(self, value: Any) -> str | None:
        """Of which kind of parts a value is; None if it is a plain one, as all are here."""
        return None

    def _fixed_parts(self) -> dict[str, Any]:
        """Further attributes, by name, that are parts."""
        return {}

    def _find_parts(self) -> Parts:
        if type(self)._kind_of is ObjectState._kind_of:
            return Parts()
        return find_parts(self._live() | self._fixed_parts(), self._kind_of)

    def _take_parts(self, parts: Parts) -> None:
        """These are the parts from now on."""
        self._parts = parts

    def _choose_source(self, allgather_object: Callable[[Any, str], list[Any]], names: Iterable[str] = ()) -> None:
        """Finds the rank from which `sync` sends, the same on all ranks. A collective of that function.

        A process that is new in a training that others were in already is never asked, nor is one without which they
        have gone on. Of the others, the one that has committed most often counts: a rank may have been lost when some
        of them had already saved the last commit. Without others, it is rank 0. names: of what the state holds beside
        plain values.

        Raises:
            ValueError: on all ranks, when the states hold different names, or an optimizer that some do not have.
        """
        goes_on = self._synced and not _is_newcomer()
        parts = self._find_parts()
        mine = (goes_on, self._synced, self._commits, sorted({*self._saved_state, *names}), parts.all_kinds())
        everyone = allgather_object((*mine, self._standing()), "elastic.synced")
        first = everyone[0][3]
        for other, (_, _, _, theirs, _, _) in enumerate(everyone):
            if theirs != first:
                only = sorted(set(theirs).symmetric_difference(first))
                sentence = (
                    f"The elastic states of rank 0 and rank {other} hold different names: {', '.join(only)} is not in "
                    "both. Give the state the same names on all ranks."
                )
                raise ValueError(coded(TrainingCode.DIFFERENT_STATES, sentence))
        progress = [(goes_on, synced, commits) for goes_on, synced, commits, _, _, _ in everyone]
        most = max(progress)
        self._source = progress.index(most) if most[1] else 0
        self._source_commits = progress[self._source][2]
        if most[0] and not goes_on:
            self._commits = 0  # of a training without which the others have gone on
        self._decide_step(goes_on, progress, [standing for *_, standing in everyone])
        self._agree(parts, [kinds for _, _, _, _, kinds, _ in everyone])

    def _standing(self) -> int:
        """What `_decide_step` of all ranks is to know of this one; only some subclasses have more to say than 0."""
        return 0

    def _decide_step(self, goes_on: bool, progress: list[tuple[bool, bool, int]], standings: list[int]) -> None:
        """Told of all ranks before anything is sent. progress: whether each goes on, is synced, and its commits."""

    def _agree(self, parts: Parts, kinds: list[dict[str, str]]) -> None:
        """Finds this rank's object for each of the source's parts and holders. What some rank does not have, such as a
        model that the others have made since they began, it gets from the source.
        """
        theirs = kinds[self._source]
        lacking = {path: rank for path in theirs for rank, one in enumerate(kinds) if one.get(path) != theirs[path]}
        for path, rank in sorted(lacking.items()):
            if theirs[path] == OPTIMIZER:
                sentence = (
                    f"The elastic state of rank {self._source} has an optimizer at {path}, but that of rank "
                    f"{rank} has none, and an optimizer can't be sent without its parameters. Make the "
                    "optimizer on all ranks before training begins, and pass it to the state."
                )
                raise ValueError(coded(TrainingCode.DIFFERENT_STATES, sentence))
        own = parts.objects()
        agreed = {path: own[path] for path in theirs if path not in lacking}
        if lacking:
            sent = {path: own[path] for path in lacking} if self._rank() == self._source else None
            received = self._broadcast_keeping(sent, self._source, self._kept_objects(agreed))
            mine = parts.all_kinds()
            agreed |= {path: own[path] if mine.get(path) == theirs[path] else received[path] for path in lacking}
        self._agreed = {path: agreed[path] for path in sorted(agreed)}

    def _kept_objects(self, objects: Mapping[str, Any]) -> list[Any]:
        """Those that copies of the values share with the values, in an order that all ranks have."""
        return [objects[path] for path in sorted(objects)]

    def _kept(self) -> list[Any]:
        return self._kept_objects(self._parts.objects())

    def _copied(self, *groups: dict[str, Any]) -> list[dict[str, Any]]:
        # One copy of all values: an object that two attributes share is shared in the copy as well.
        memo: dict[int, Any] = {id(kept): kept for kept in self._kept()}
        copies: list[dict[str, Any]] = []
        for values in groups:
            copies.append({})
            for name, value in values.items():
                try:
                    copies[-1][name] = copy.deepcopy(value, memo)
                except Exception as error:  # any class: objects define how they are copied
                    raise ValueError(
                        coded(
                            TrainingCode.UNCOPYABLE_STATE,
                            f"{type(self).__name__} can't save its attribute {name!r}, a "
                            f"{type(value).__name__} ({type(error).__name__}: {error}). Keep something that "
                            "can be copied in it, for example a state_dict.",
                        )
                    ) from error
        return copies


class NotificationManager:
    """Passes news about hosts on to the states that are in training.

    The news come from the coordinator, when processes wait to be taken into an elastic world or members of it are about
    to leave, and from code that knows and calls `handle_hosts_updated`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields; not held while listeners are called
        self._changing_epoch = 0  # epoch of the last world of which a change was announced
        self._changes = HostUpdateResult.no_update  # changes of that world that were announced
        self._leavers: tuple[int, ...] = ()  # ranks of that world that are to leave for good
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

    def world_changes(self, change: WorldChange) -> None:
        """The world that this process is in, or is to enter, is about to change."""
        if change.coming:
            self.handle_hosts_updated(Announced(self._now()), HostUpdateResult.added)
            return
        result = HostUpdateResult.added if change.newcomers else HostUpdateResult.removed
        with self._lock:
            earlier = self._changes if self._changing_epoch == change.epoch else HostUpdateResult.no_update
            self._changing_epoch, self._changes = change.epoch, earlier | result
            self._leavers = change.leavers or (self._leavers if earlier else ())
        if change.newcomers:
            self._watch(change.epoch, change.newcomers)
        self._heed(change.epoch)
        self.handle_hosts_updated(self._now(), result)

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
        """Tells this listener once more that its world is about to change, if it is. A change is announced once, which
        may have been before this listener was registered, or while its on_reset() dropped the news of an earlier world.
        """
        with self._lock:
            epoch, changes = self._changing_epoch, self._changes
        self._heed(epoch)
        if epoch and is_member() and current().world.epoch == epoch:
            listener.on_hosts_updated(self._now(), changes)

    def _heed(self, epoch: int) -> None:
        """Where this process is among those that are to leave, it does so at the next commit, although it has not said
        so itself: its launcher wants it back.
        """
        try:
            world = current().world
        except ValueError:  # this process leaves its world just now, or has not entered it yet: then it is told again
            return
        with self._lock:
            leavers = self._leavers
        if world.epoch == epoch and world.rank in leavers:
            # Not in this thread, which is that of the membership, or holds a lock that is needed for this.
            _thread.start_new_thread(departure.request, (WANTED_BACK,))

    def _now(self) -> float:
        """Later than all before, also when the clock was set back: a state takes no notice of older news."""
        with self._lock:
            self._latest = max(time.time(), math.nextafter(self._latest, math.inf))
            return self._latest

    def handle_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Tells all listeners; those of rank 0 interrupt all ranks at their next commit() or check_host_updates().

        Args:
            timestamp: when the hosts changed, in seconds; news that is not newer than the last news is ignored.
            update_res: whether hosts were added, removed or both.
        """
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


class _Work:
    """What this process tells its coordinator of the work in `hvd.elastic.run`, so that none that is committed is lost
    or done again without a word (coordinator/core/world/work.py): once in each world that it has committed, and that
    the function has returned.
    """

    def __init__(self) -> None:
        self._runs = 0  # elastic functions that run; one may call another
        self._earlier = 0  # commits of functions that have returned
        self._commits = 0
        self._told_epoch = 0  # the world in which this process has said that it has committed
        self._is_done = False  # whether this process has said that its function has returned

    def begins(self) -> None:
        self._runs += 1
        if self._is_done:
            self._is_done = False
            say_work(done=False)

    def synced(self, state: State) -> None:
        """The state is equal on all ranks of this world."""
        # A script's own state class may have no commits.
        self._commits = state._commits if isinstance(state, State) else 0
        hold_state(self._earlier + self._commits)

    def committed(self, commits: int) -> None:
        self._commits = commits
        if not self._runs or not is_member():
            return
        hold_commits(self._earlier + commits)
        if (epoch := current().world.epoch) != self._told_epoch:
            self._told_epoch = epoch
            say_work(committed=True)

    def returned(self) -> None:
        """Raises HorovodInternalError where the others have gone on without this process: the work is theirs."""
        if removed := say_work(done=True):
            raise HorovodInternalError(removed)
        self._earlier += self._commits
        self._is_done = True

    def ends(self) -> None:
        self._runs -= 1


_work: Final = _Work()
notification_manager: Final = NotificationManager()
when_world_changes(notification_manager.world_changes)


def leave_at_next_commit(reason: str = "") -> None:
    """This process leaves its elastic job at the next commit, for good, and no step of the others fails.

    SIGTERM does the same in `hvd.elastic.run`. Call this function if your program has its own SIGTERM handler, trains
    outside the main thread, or learns in another way that its host is about to be taken away. Any thread and any
    signal handler may call it. All ranks go on until the next `state.commit()` or `state.check_host_updates()`. Then
    the other ranks continue training, and on this rank `hvd.elastic.run` raises SystemExit with the code 143. Further
    calls do nothing. Example:

        >>> def on_notice(time):  # called by a thread that asks the provider of the host
        ...     hvd.elastic.leave_at_next_commit(f"its host is taken away at {time}")

    Args:
        reason: part of a sentence that all ranks are told.

    Raises:
        ValueError: before hvd.init(), or the job has a fixed size, so that the others could not go on.
    """
    if not departure.is_between_worlds and not current().is_elastic:
        sentence = (
            "hvd.elastic.leave_at_next_commit() is for jobs whose size may change, and this one has a fixed size. Give "
            "it HOROVOD_MIN_SIZE and HOROVOD_MAX_SIZE."
        )
        raise ValueError(coded(SettingCode.UNSUPPORTED, sentence))
    # Not in this thread: a handler of a signal may have interrupted one that holds a lock which is needed for this.
    _thread.start_new_thread(departure.request, (reason or "its program said so",))


def check_results() -> None:
    """Raises HorovodInternalError where collectives on a GPU may have ended without their results.

    Call it once the GPU has nothing left to do.
    """
    if is_member():
        current().engine.check_results()


def _settled(state: State, result: Any = None) -> Any:
    """`result`, once `state` is what the steps that were queued make of it."""
    if isinstance(state, State):  # a script may have its own class
        state._settle()
    return result


def _go_back(state: State, error: HorovodInternalError) -> None:
    log.warning("Going back to the last commit and joining the next world, because: %s", error)
    state.restore()


def _is_newcomer() -> bool:
    """Whether this process was not in the last world of its job, in which others of its world were."""
    if not is_member():
        return False
    world = current().world
    return world.rank in world.newcomers


def run_fn(
    func: Callable[..., Any],
    reset: Callable[[], None],
    with_our_errors: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Callable[..., Any]:
    """`func(state, ...)` in the loop that this module draws; `reset` ends the process's place in the world and joins
    the next one. `reset` may call shutdown() and init(): while it runs, shutdown() tells the coordinator that this
    process comes back. Within with_our_errors, an error of a framework about a lost rank becomes HorovodInternalError.
    It surrounds all code that may run a collective: the state's callbacks, its `sync`, and `func`.

    Other exceptions than the two of the loop propagate, those of `reset` too. So does a HorovodInternalError that the
    script itself makes in each world, such as tensors of different shapes: the loop ends with it after VAIN_ROUNDS
    rounds in a row without a commit. The loss of ranks ends no loop. A process that is to leave its job does not go
    round: SystemExit.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        notification_manager.register_listener(state)
        _work.begins()
        try:
            with departure.heeded():
                return _rounds(state, lambda: func(state, *args, **kwargs), reset, with_our_errors)
        finally:
            _work.ends()
            notification_manager.remove_listener(state)

    return wrapper


class _VainRounds:
    """Counts the rounds in a row that made no commit and ended with an error of the script's own making."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._count = 0
        self._commits = self._commits_now()

    def _commits_now(self) -> int:
        return self._state._commits if isinstance(self._state, State) else 0  # a script may have its own class

    def are_too_many(self, error: HorovodInternalError) -> bool:
        """Whether another round would end like this one, which `error` has ended."""
        commits = self._commits_now()
        if commits != self._commits:
            self._commits, self._count = commits, 0
        code = code_of(error)
        is_of_script = isinstance(code, (OperationCode, TrainingCode)) and code not in _HAPPENS
        if not is_of_script or not isinstance(self._state, State):
            return False
        self._count += 1
        if self._count < VAIN_ROUNDS:
            return False
        log.error(
            "%d attempts in a row ended with an error of the script and without a commit, so training ends "
            "with the last error. Correct its cause. hvd.elastic.run only retries after the loss of ranks.",
            self._count,
        )
        return True


def _rounds(
    state: State,
    train: Callable[[], Any],
    reset: Callable[[], None],
    with_our_errors: Callable[[], contextlib.AbstractContextManager[None]],
) -> Any:
    is_new_world = False
    vain = _VainRounds(state)
    while True:
        try:
            with with_our_errors():
                if is_new_world:
                    state.on_reset()
                    notification_manager.tell_again(state)
                state.sync()
                _work.synced(state)
                # After failures the processes have made different optimizers; newcomers have made others.
                optimizer_numbers.restart(state._optimizers() if isinstance(state, State) else ())
                result = train()
            result = _settled(state, result)
            _work.returned()
            return result
        except HorovodInternalError as error:
            if vain.are_too_many(error):
                raise
            _go_back(state, error)
        except HostsUpdatedInterrupt:
            log.info("Joining the next world, because hosts came or went.")
            try:
                _settled(state)
            except HorovodInternalError as error:
                _go_back(state, error)
        except Exception as error:
            if not departure.explains_error():
                raise
            log.warning(
                "After SIGTERM the training function raised %s: %s. If the signal also ended a process that "
                "this one needs, such as a DataLoader worker, training can't continue to the next commit.",
                type(error).__name__,
                error,
            )
        if reason := departure.leaves_world():
            leave_for_good(reason)
            log.warning("This process has left the job (%s), and ends with exit code %d.", reason, EXIT_CODE)
            raise SystemExit(EXIT_CODE)
        reset()
        departure.begins()
        is_new_world = True
