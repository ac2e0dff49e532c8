"""The gradient reducer behind DistributedOptimizer: it reduces each gradient as soon as the backward pass has made it.

    hook fires, countdown 2 -> 1     local accumulation (backward_passes_per_step)
    hook fires, countdown 1 -> 0     the gradient is ready; with `groups`, the last member makes its group ready
    enough bytes are ready           they are handed to the engine, which reduces them while the backward pass goes on
    the backward pass ends           the rest is handed over; if all gradients are made, on all ranks, it waits for the
                                     averages, so that they are what the script finds in `.grad` after backward()
    synchronize()                    if that was not so: what no hook made ready (unused parameters: zeros) is handed
                                     over; waits for all, and goes on where a GradientCompressor reduces something else

Whether a backward pass waits is agreed on by all ranks (AllMade), in an operation that travels with the last gradient.
Where it does not wait, the script must not touch gradients before synchronize(). Where it waits but another rank is in
synchronize() or step() already, because it has made no gradients, the script may read them, but what it does to them is
done on this rank only. In both cases all ranks hear in synchronize() or step() whether a script has changed a gradient;
then it is an error on all of them, before one has taken the step.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Average
from horovod.common.exceptions import HorovodInternalError
from horovod.common.gradients import name_of_group
from horovod.common.ops.all_made import AllMade, all_made
from horovod.common.ops.buckets import HANDOVER_BYTES, Buckets, Group
from horovod.common.ops.objects import allgather_object
from horovod.common.ops.step_words import Heard, Outcome, Past, Word
from horovod.common.optimizer_numbers import Made
from horovod.common.process_sets import ProcessSet
from horovod.common.same_weights import SameWeights
from horovod.torch.compression import Compressor, GradientCompressor, NoneCompressor
from horovod.torch.internals import EndOfBackward, in_place_of_script
from horovod.torch.misuse import Rivals, SameGradients, not_reduced
from horovod.torch.same_weights import same_weights
from horovod.torch.sending import Sender
from horovod.torch.slots import Slot
from horovod.torch.step_errors import Report, dropped, parted, sentence
from horovod.worker.runtime.context import Context, current, is_member

TOO_MANY_PASSES: Final = coded(
    TrainingCode.TOO_MANY_PASSES,
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally.",
)


class GradientReducer:
    """Reduces the gradients of named parameters. Not thread-safe: one training loop uses it (hooks included)."""

    def __init__(
        self,
        *,
        compression: type[Compressor] | GradientCompressor,
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        made: Made,
        enabled: bool,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """optimizer: which holds the parameters, and lives as long as this."""
        self.enabled = enabled  # whether there are other ranks to reduce with
        self.passes = backward_passes_per_step
        self.steps = 0  # steps that the optimizer has taken
        self.op = op
        self._predivide_factor = gradient_predivide_factor
        self.process_set = process_set
        # An average of one rank, or one of what was made smaller, says nothing.
        comparable = enabled and op == Average and compression is NoneCompressor
        self._sender = Sender(
            compression=compression,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
            same=SameGradients() if comparable else None,
        )
        self._made = made
        made.tell = weakref.WeakMethod(self._rename)
        self._slots: dict[int, Slot] = {}  # id of a parameter -> its slot
        self._frozen: dict[int, Slot] = {}  # slots of parameters that had no gradients so far
        self._groups: list[Group[Slot]] = []
        self._held: list[Slot] = []  # slots that are ready, but which only the end of the backward pass hands over
        self._buckets = Buckets[Slot]()  # slots that are ready and not handed to the engine yet
        self._queued = 0  # number of slots with `queued` set
        self._end = EndOfBackward(inner=self._flush, outermost=self._backward_ended)
        self._over = False  # a backward pass has ended, and gradients of it are in flight
        self._all_made = AllMade(None, process_set)  # replaced when the names are known
        self._hooks: list[Any] = []
        self._rivals = Rivals(self)
        self._active = False
        self._world: weakref.ref[Context] | None = None  # the world in which the step has begun
        self._averaged = False  # a backward pass has waited for all averages; the script has not asked for them yet
        self._open = False  # whether other ranks wait in synchronize() or step() to hear what becomes of the averages
        self.stale = False  # gradients were computed since the last synchronize()
        # What becomes of averages: they are in `.grad`, then a step is taken with them or the script drops them.
        self._left = False  # averages are in `.grad`, and neither has happened
        # True: a step was taken with the last averages. False: they were dropped. None: neither, or not known.
        self._stepped: bool | None = None
        self._scaler: weakref.ref[Any] | None = None  # the GradScaler that was seen to call step()
        self._same_weights = self._compare(optimizer)
        weakref.finalize(self, _remove, self._hooks).atexit = False

    # -- parameters ------------------------------------------------------------------------------------------------
    def watch(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Reduces these parameters' gradients from now on; those of frozen ones when they are unfrozen."""
        named = list(named)
        self._rivals.look(named)
        self._same_weights.ask()
        self._made.add(name for name, _ in named)
        if self._all_made.wire is None and named:
            self._begin_words()
        for name, parameter in named:
            if id(parameter) in self._slots or id(parameter) in self._frozen:
                continue
            slot = Slot(name, parameter, self.passes)
            slot.rename(self._made)
            if parameter.requires_grad:
                self._slots[id(parameter)] = slot
                self._add_hook(slot)
                continue
            # A hook stays when a parameter is frozen and unfrozen, but only one that is not frozen takes it.
            try:
                parameter.requires_grad_(True)
            except RuntimeError:  # the parameter can have no gradient, as its numbers are no floating-point numbers
                continue
            self._frozen[id(parameter)] = slot
            self._add_hook(slot)
            parameter.requires_grad_(False)

    def _unfreeze(self) -> None:
        for key in [key for key, slot in self._frozen.items() if slot.parameter.requires_grad]:
            self._slots[key] = self._frozen.pop(key)

    def group(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        """Reduces each group's gradients as one operation."""
        for parameters in groups:
            slots = [self._slots[id(parameter)] for parameter in parameters if id(parameter) in self._slots]
            if len(slots) > 1:
                self._groups.append(Group(slots, name_of_group([slot.label for slot in slots])))

    def _begin_words(self) -> None:
        self._all_made.optimizers.discard(self)
        self._all_made = all_made(self._made.first(), self.process_set, self)
        self._all_made.reduce_as(self.op, self._predivide_factor)

    def _rename(self) -> None:
        """The optimizer has another number, by which its gradients are known to other ranks from now on."""
        for slots in (self._slots, self._frozen):
            for slot in slots.values():
                slot.rename(self._made)
        for group in self._groups:
            group.name = name_of_group([slot.label for slot in group.slots])
        if self._all_made.wire is not None:
            self._begin_words()

    def first_name(self) -> str:
        """The first of the names by which its gradients are known to other ranks."""
        return self._made.first()

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        for slots in (self._slots, self._frozen):
            for slot in slots.values():
                slot.countdown = passes

    def watches(self, parameter: torch.Tensor) -> bool:
        """Whether it reduces the parameter's gradients, or will when it is unfrozen."""
        slot = self._slots.get(id(parameter)) or self._frozen.get(id(parameter))
        return slot is not None and slot.parameter is parameter

    def _compare(self, optimizer: torch.optim.Optimizer) -> SameWeights:
        reference = weakref.ref(self)

        def trained(_: object) -> list[tuple[str, torch.Tensor]]:
            slots = [] if (reducer := reference()) is None else reducer._slots.values()
            return [(slot.name, slot.parameter) for slot in slots if slot.parameter.requires_grad]

        def scaler() -> Any:
            reducer = reference()
            return None if reducer is None or reducer._scaler is None else reducer._scaler()

        return same_weights(optimizer, trained, self.process_set, self._made, scaler)

    def compare_weights(self) -> None:
        """Compares what the ranks' optimizers hold in the next step."""
        self._same_weights.ask()

    def compare_after_loading(self, optimizer: torch.optim.Optimizer) -> None:
        """Does so in the first step after load_state_dict of an optimizer that is not a distributed one itself."""
        reference = weakref.ref(self)

        def loaded(_: object) -> None:
            if (reducer := reference()) is not None:
                reducer.compare_weights()

        self._hooks.append(optimizer.register_load_state_dict_post_hook(loaded))

    def note_scaler(self, scaler: object) -> None:
        """A GradScaler calls step(): its scale is compared in the next step."""
        if self._scaler is None or self._scaler() is not scaler:
            self._scaler = weakref.ref(scaler)
            self._same_weights.ask()

    def compare_no_more(self) -> None:
        """Says nothing of ranks that compute the same gradients from now on."""
        self._sender.compare_no_more()

    def names(self) -> dict[torch.Tensor, str]:
        """Of the parameters that are watched."""
        return {slot.parameter: slot.name for slot in self._slots.values()}

    def trained(self) -> set[torch.Tensor]:
        """The parameters whose gradients are reduced in the next step."""
        return {slot.parameter for slot in self._slots.values() if slot.parameter.requires_grad}

    def on_their_way(self) -> dict[torch.Tensor, Callable[[], bool | None] | None]:
        """The parameters whose gradients are in flight, with what waits for each or for its group."""
        return {slot.parameter: slot.finish for slot in self._slots.values() if slot.queued}

    # -- in the backward pass ------------------------------------------------------------------------------------------
    def _add_hook(self, slot: Slot) -> None:
        # The parameter owns the hook: it must not keep the optimizer alive, nor reduce for one that is gone.
        reference = weakref.ref(self)

        def accumulated(_: torch.Tensor) -> None:
            if (reducer := reference()) is not None:
                reducer._accumulated(slot)

        # Compiled autograd must call this as it is: what it does is outside of what can be traced.
        untraced: Callable[[torch.Tensor], None] = torch.compiler.disable(accumulated)  # type: ignore[no-untyped-call]
        self._hooks.append(slot.parameter.register_post_accumulate_grad_hook(untraced))  # type: ignore[no-untyped-call]

    def _accumulated(self, slot: Slot) -> None:
        again = slot.fired_in == self._end.passes  # made again in one backward pass, inside of which others run
        slot.fired_in = self._end.passes
        if slot.queued:
            if again and slot.gradient is None:
                slot.several_times = True
                return
            raise AssertionError(_made_several_times(slot.name) if again else TOO_MANY_PASSES)
        self._drop_averages()
        if self._averaged:
            if self._open and not slot.was_added_to():
                self._settle(skipped=True)
            self._averaged = False
            if slot.was_added_to():
                raise AssertionError(TOO_MANY_PASSES)
        if self._frozen and id(slot.parameter) in self._frozen:
            self._unfreeze()
        self.stale = True
        if self.passes > 1:
            if again:
                slot.several_times = True
                return
            if slot.was_cleared():
                slot.countdown = self.passes
            slot.note_pass()
        slot.countdown -= 1
        if slot.countdown <= 0:
            self._ready(slot)
        elif not self._end.expect():
            self._end.passes += 1

    def _ready(self, slot: Slot) -> None:
        if not self._active:
            self._begin()
        slot.queued = True
        self._queued += 1
        enough = False
        # Before the end of its first backward pass nobody knows whether another pass inside of that adds to it.
        if slot.once:
            enough = self._queue(slot)
        else:
            self._held.append(slot)
        end_is_told = self._end.expect()
        if enough:
            self._flush()
        if not end_is_told:  # so each gradient may be the last one
            self._end.passes += 1
            self._backward_ended()

    def _begin(self) -> None:
        self._rivals.check()
        if not self._active:
            self._world = weakref.ref(current())
        if self.enabled:
            self._made.begin()
        self._active = self._all_made.begun = True
        # A thread of the script, not one of autograd's.
        if not isinstance(threading.current_thread(), threading._DummyThread):
            self._all_made.thread = threading.get_ident()

    def _queue(self, slot: Slot) -> bool:
        gradient = slot.parameter.grad
        assert gradient is not None
        return self._buckets.add(slot, gradient.nbytes if gradient.layout is torch.strided else HANDOVER_BYTES)

    def _queue_held(self) -> None:
        held, self._held = self._held, []
        for slot in held:
            slot.once = not slot.several_times
            self._queue(slot)

    def _flush(self) -> None:
        self._hand_over(wait_follows=False)

    def _backward_ended(self) -> None:
        """Waits for the averages if all gradients are made. May be called again when nothing has happened since."""
        if not self._active:
            return
        self._queue_held()
        self._unfreeze()
        has_all = self._has_made_all()
        if has_all and self._all_made.word is None:
            try:
                outcome = self._await_averages()
            except BaseException:
                self._clear()
                raise
            if outcome is not Outcome.UNMADE:
                self._keep_averages(outcome is Outcome.AVERAGED)
                return
        else:
            self._flush()
            if has_all:
                self._start_parts_of_groups()
                self._all_made.submitted = True
        self._over = True
        for slot in self._slots.values():
            slot.allow_changes(alone=True)

    def _await_averages(self) -> Outcome:
        self._hand_over(wait_follows=True)
        self._start_parts_of_groups()
        with in_place_of_script():
            self._all_made.say(Word.MADE, digest=self._same_weights.digest(), past=self._past())
            heard = self._all_made.hear()
            self._check_past(heard)
            self._compare_weights(heard)
            if heard.outcome is not Outcome.UNMADE:
                self._finish()
        return heard.outcome

    def _compare_weights(self, heard: Heard) -> None:
        if (wire := self._all_made.wire) is not None:
            self._same_weights.take(heard, wire)

    def _keep_averages(self, is_open: bool) -> None:
        if is_open:
            self._clear_flight()
        else:
            self._clear()
        self._averaged, self._open = True, is_open
        self._left = True
        for slot in self._slots.values():
            slot.remember()
            if is_open and slot.parameter.grad is not None:
                slot.hand_over(slot.parameter.grad)

    def _has_made_all(self) -> bool:
        slots = self._slots.values()
        return self._queued == len(slots) or all(slot.queued or not slot.parameter.requires_grad for slot in slots)

    def _hand_over(self, wait_follows: bool) -> None:
        self._buckets.hand_over(self._sender.start, self._sender.start_group, wait_follows)

    # -- the end of a step --------------------------------------------------------------------------------------------
    @property
    def in_flight(self) -> bool:
        """Whether gradients are on their way, so that they must not be touched."""
        return self._active

    @property
    def has_made_any(self) -> bool:
        """Whether a backward pass has made gradients that were reduced, or are to be, and `synchronize` is due."""
        return self._active or self._averaged

    @property
    def averaged(self) -> bool:
        """Whether a backward pass has waited for all averages on all ranks, and `synchronize` has nothing to do."""
        return self._averaged and not self._open

    @property
    def watched_by_others(self) -> bool:
        """Whether other ranks are to hear of what the script does to the gradients."""
        return self._active or self._open

    def synchronize(self, scaled: bool = False) -> None:
        """Reduces what no hook made ready, waits for everything and leaves the reduced gradients in `.grad`.

        Raises AssertionError, on all ranks: the script has changed a gradient meanwhile. scaled: so it has.
        """
        if self.averaged:
            self._averaged = False
            return
        if self._open:
            self._settle(scaled)
            return
        self._end_step(scaled=scaled)

    def _end_step(self, scaled: bool = False, skipped: bool = False) -> None:
        """AssertionError, on all ranks: one of them has changed gradients, or takes no step (`skipped`)."""
        self._unfreeze()
        self._begin()
        try:
            past = self._past()
            changes = () if skipped else self._changes(self._over)
            self._queue_held()
            missing = [slot for slot in self._slots.values() if not slot.queued and slot.parameter.requires_grad]
            for slot in missing:
                if slot.parameter.grad is None:
                    slot.parameter.grad = slot.zeros()
                slot.queued = True
                self._buckets.add(slot)
            self._hand_over(wait_follows=True)
            self._start_parts_of_groups()
            digest = self._same_weights.digest()
            self._all_made.say(Word.FINAL, bool(changes) or scaled or skipped, digest=digest, past=past)
            self._finish()
            self._agree(digest, Report(changes, scaled, skipped, tuple(slot.name for slot in missing)))
        finally:
            self._clear()
        self._left = True

    def settle(self) -> None:
        """The script takes the step without `synchronize`. AssertionError: it has not called that before."""
        if self._past() is Past.EMPTY:
            raise AssertionError(coded(TrainingCode.DROPPED_AVERAGES, dropped(self.steps + 1)))
        if self._open:
            self._settle()
        elif self._active:
            raise AssertionError(
                coded(
                    TrainingCode.GRADIENTS_IN_FLIGHT,
                    "optimizer.step() was called inside optimizer.skip_synchronize() while gradients were being "
                    "reduced. Call optimizer.synchronize() after loss.backward(), on all ranks.",
                )
            )

    def restart(self) -> None:
        """The script clears the gradients: passes are counted anew. AssertionError as by `synchronize`."""
        if self._open:
            self._settle(skipped=True)
        self._drop_averages()
        self._averaged = False
        self.stale = False
        if self.passes > 1:
            for slot in self._slots.values():
                slot.countdown = self.passes
                slot.fired_in = -1

    def _settle(self, scaled: bool = False, skipped: bool = False) -> None:
        """After a backward pass that has waited, tells the ranks that wait to hear what became of the averages."""
        try:
            changes = () if skipped else self._changes(exact=True)
            digest = self._same_weights.digest()
            self._all_made.say(Word.FINAL, bool(changes) or scaled or skipped, digest=digest)
            self._agree(digest, Report(changes, scaled, skipped))
        finally:
            self._clear()
        self._left = True

    def _agree(self, digest: int | None, report: Report) -> None:
        """Waits until all ranks are here. AssertionError where one has changed a gradient."""
        heard = self._all_made.until_over(report.is_change, digest)
        self._check_past(heard)
        if not heard.changed:
            self._compare_weights(heard)
            return
        reports = {current().world.rank: report}
        ranks = self.process_set.ranks or range(current().world.size)
        if heard.outcome is Outcome.OVER and len(ranks) > 1:
            with contextlib.suppress(HorovodInternalError):  # a rank has called hvd.join()
                everybody = allgather_object(report, f"{self._all_made.wire}.reports", self.process_set)
                reports = dict(zip(ranks, everybody, strict=True))
        raise AssertionError(coded(TrainingCode.CHANGED_GRADIENTS, sentence(self.steps + 1, reports, len(self._slots))))

    def _past(self) -> Past | None:
        """What this rank tells the others of the last averages.

        Nothing of those of an earlier world, whose steps may have been undone, nor of those from before hvd.join(),
        when ranks may have taken different numbers of steps.
        """
        if not self._all_made.has_heard:
            self._stepped = None
        if self._stepped is None:
            return None
        if not self._stepped and not self.stale and not self._has_gradients():
            return Past.EMPTY
        if current().settings.different_weights == "ignore":
            return None
        return Past.STEPPED if self._stepped else Past.DROPPED

    def _check_past(self, heard: Heard) -> None:
        """AssertionError, on all ranks: some or all of them have dropped averages where a step was to be taken."""
        if heard.parted:
            raise AssertionError(coded(TrainingCode.DROPPED_AVERAGES, parted(self.steps + 1)))
        if heard.empty:
            raise AssertionError(coded(TrainingCode.DROPPED_AVERAGES, dropped(self.steps + 1)))

    def _start_parts_of_groups(self) -> None:
        for group in self._groups:
            # A member that was frozen meanwhile has no gradient of its own; the group needs it all the same.
            if 0 < group.missing < len(group.slots):
                for slot in group.slots:
                    if slot.parameter.grad is None:
                        slot.parameter.grad = slot.zeros()
                self._sender.start_group(group, True)
                group.missing = 0

    def _changes(self, exact: bool) -> tuple[tuple[str, str], ...]:
        """What the script has changed: names of parameters, with verbs."""
        return tuple((slot.name, change) for slot in self._slots.values() if (change := slot.change(exact)))

    def _finish(self) -> None:
        """Waits for all gradients that are in flight."""
        unfinished = [slot.finish for slot in self._slots.values() if slot.finish is not None]
        while unfinished:
            unfinished = [finish for finish in unfinished if finish()]
        self.stale = False
        self._sender.finished()

    def note_step(self) -> None:
        """A step was taken with the averages: the next synchronize() reduces anew."""
        self._averaged = self._left = False
        self._stepped = True

    def _drop_averages(self) -> None:
        if self._left:
            self._left = self._stepped = False

    def stepped_past(self) -> None:
        """A step begins past the distributed optimizer. AssertionError: it would not be the same on all ranks."""
        if self._active or self._open:
            raise not_reduced("while gradients were being reduced or other ranks waited for this one")
        if self.stale and self._has_gradients():
            raise not_reduced(
                "with gradients that were not reduced yet (gradients are after "
                f"{self.passes} backward passes, as backward_passes_per_step says)"
            )
        if self._past() is Past.EMPTY:
            raise AssertionError(coded(TrainingCode.DROPPED_AVERAGES, dropped(self.steps + 1)))
        self.note_step()

    def _has_gradients(self) -> bool:
        """Whether any is there that is not zero, such as one that the script has set itself."""
        gradients = [slot.parameter.grad for slot in self._slots.values()]
        return any(one.layout is not torch.strided or bool(one.any()) for one in gradients if one is not None)

    def reset(self) -> None:
        """Ends a step that has begun, without taking it, and waits for the gradients that are in flight.

        They meet those of the other ranks, which hear it in their synchronize() or step() (AssertionError there); the
        next ones would meet them otherwise. Of a world that is over, everything is forgotten.
        """
        if self._active and self._world is not None and is_member() and self._world() is current():
            with contextlib.suppress(AssertionError, ValueError, HorovodInternalError):
                self._end_step(skipped=True)
        self._forget()

    def _forget(self) -> None:
        """Forgets what is in flight (the engine keeps the memory until it is done) and starts a new step."""
        self._all_made.leave()
        self._clear()

    def close(self) -> None:
        """Forgets what is in flight, and reduces nothing any more."""
        self._forget()
        _remove(self._hooks)
        self._made.retire()
        self.enabled = False

    def _clear(self) -> None:
        self._all_made.end()
        self._made.end()
        self._clear_flight()

    def _clear_flight(self) -> None:
        self._buckets.clear()
        self._held.clear()
        self._queued = 0
        self._active = self._averaged = self._open = self._over = self._left = False
        self._stepped = None
        self._end.forget()
        for slot in self._slots.values():
            slot.end()
            slot.countdown = self.passes
        for group in self._groups:
            group.missing = len(group.slots)


def _made_several_times(name: str) -> str:
    return coded(
        TrainingCode.MADE_SEVERAL_TIMES,
        f"A backward pass made the gradient of parameter {name!r} several times, but earlier passes only once, so it "
        "is being reduced already. torch.utils.checkpoint(use_reentrant=True) runs a separate backward pass for each "
        "use of a parameter; pass use_reentrant=False.",
    )


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
