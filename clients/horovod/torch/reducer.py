"""The gradient reducer behind DistributedOptimizer: it reduces each gradient as soon as the backward pass has made it.

    hook fires, countdown 2 -> 1     local accumulation (backward_passes_per_step)
    hook fires, countdown 1 -> 0     the gradient is ready; with `groups`, the last member makes its group ready
    enough bytes are ready           they are handed to the engine, which reduces them while the backward pass goes on
    the backward pass ends           the rest is handed over; if all gradients are made, on all ranks, it waits for the
                                     averages, so that they are what the script finds in `.grad` after backward()
    synchronize()                    if that was not so: what no hook made ready (unused parameters: zeros) is handed
                                     over; waits for all, and goes on where a GradientCompressor reduces something else

No rank waits in a backward pass for one that waits for another operation: with its last gradient it submits an
operation of AllMade, in which a rank that has not made all gradients takes part before it waits for anything else
(undecided.py), and then the average is not waited for. There the script must not touch the gradients before
synchronize(). If it has changed one it gets an error, whether the change or the reduction came first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from horovod._core import Handle, OpType
from horovod.common.basics import Average, Sum
from horovod.common.ops.all_made import AllMade
from horovod.common.ops.buckets import HANDOVER_BYTES, Buckets, Group
from horovod.common.ops.specs import reduction, set_number, set_size
from horovod.common.ops.undecided import UNDECIDED
from horovod.common.process_sets import ProcessSet
from horovod.torch.compression import Compressor, GradientCompressor, NoneCompressor
from horovod.torch.end_of_backward import EndOfBackward, in_place_of_script
from horovod.torch.handles import synchronize
from horovod.torch.ops.sparse import sparse_allreduce_async
from horovod.torch.rounds import Rounds
from horovod.torch.same_gradients import SameGradients
from horovod.torch.slots import Slot
from horovod.torch.tensors import COLLECTIVES, READER
from horovod.worker.runtime.context import Context, current

IN_FLIGHT: Final = (
    "so it is neither the average nor what was meant, and may differ between ranks. Call optimizer.synchronize() after "
    "loss.backward() and before gradients are changed (by clipping or GradScaler, for example), and then "
    "optimizer.step() inside `with optimizer.skip_synchronize():`."
)

TOO_MANY_PASSES: Final = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
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
        enabled: bool,
    ) -> None:
        self.enabled = enabled  # whether there is anyone to reduce with
        self.passes = backward_passes_per_step
        self._in_rounds = compression if isinstance(compression, GradientCompressor) else None
        self._compression: type[Compressor] | None = None
        if not isinstance(compression, GradientCompressor) and compression is not NoneCompressor:
            self._compression = compression
        self._op = op
        self._prescale = 1.0 / gradient_predivide_factor
        self._postscale = gradient_predivide_factor
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._slots: dict[int, Slot] = {}  # by id of the parameter, in the order of the names
        self._groups: list[Group[Slot]] = []
        self._buckets = Buckets[Slot]()  # ready, not handed to the engine
        self._queued = 0  # number of slots that are
        self._end = EndOfBackward(inner=self._flush, outermost=self._backward_ended)
        self._over = False  # a backward pass has ended, and gradients of it are in flight
        self._undecided_in: Context | None = None  # the world in which this one was last put into UNDECIDED
        self._all_made = AllMade()
        self._hooks: list[Any] = []
        self._frozen: list[tuple[str, torch.Tensor]] = []
        self._active = False
        self._averaged = False  # a backward pass has waited for all averages; the script has not asked for them yet
        self.stale = False  # gradients were computed since the last synchronize()
        # An average of one rank, or one of what was made smaller, says nothing.
        comparable = enabled and op == Average and compression is NoneCompressor
        self._same = SameGradients() if comparable else None
        weakref.finalize(self, _remove, self._hooks).atexit = False

    # -- parameters ------------------------------------------------------------------------------------------------
    def watch(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Reduces these parameters' gradients from now on. Frozen ones join when they are unfrozen."""
        named = list(named)
        self._all_made.name(name for name, _ in named)
        for name, parameter in named:
            if not parameter.requires_grad:
                self._frozen.append((name, parameter))
            elif id(parameter) not in self._slots:
                slot = Slot(name, parameter, self.passes)
                self._slots[id(parameter)] = slot
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook(slot)))  # type: ignore[no-untyped-call]

    def group(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        """Reduces each group's gradients as one operation."""
        for parameters in groups:
            slots = [self._slots[id(parameter)] for parameter in parameters if id(parameter) in self._slots]
            if len(slots) > 1:
                self._groups.append(Group(slots))

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        for slot in self._slots.values():
            slot.countdown = passes

    def _hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        # The parameter owns the hook: it must not keep the optimizer alive, nor reduce for one that is gone.
        reference = weakref.ref(self)

        def accumulated(_: torch.Tensor) -> None:
            reducer = reference()
            if reducer is None:
                return
            if slot.queued:
                raise AssertionError(TOO_MANY_PASSES)
            if reducer._averaged:
                reducer.forget_averages()
                if slot.was_added_to():
                    raise AssertionError(TOO_MANY_PASSES)
            reducer.stale = True
            slot.countdown -= 1
            if slot.countdown <= 0:
                reducer._ready(slot)

        # Compiled autograd must call this as it is: what it does is outside of what can be traced.
        untraced: Callable[[torch.Tensor], None] = torch.compiler.disable(accumulated)  # type: ignore[no-untyped-call]
        return untraced

    def names(self) -> dict[torch.Tensor, str]:
        """Of the parameters that are watched."""
        return {slot.parameter: slot.name for slot in self._slots.values()}

    def trained(self) -> set[torch.Tensor]:
        """The parameters whose gradients are reduced in the next step."""
        return {slot.parameter for slot in self._slots.values() if slot.parameter.requires_grad}

    def on_their_way(self) -> dict[torch.Tensor, Callable[[], bool | None] | None]:
        """The parameters whose gradients are in flight, with what waits for each or for its group."""
        return {slot.parameter: slot.finish for slot in self._slots.values() if slot.queued}

    # -- the way to the engine --------------------------------------------------------------------------------------
    def _ready(self, slot: Slot) -> None:
        slot.queued = self._active = True
        self._queued += 1
        gradient = slot.parameter.grad
        assert gradient is not None
        enough = self._buckets.add(slot, gradient.nbytes if gradient.layout is torch.strided else HANDOVER_BYTES)
        end_is_told = self._end.expect()
        if enough:
            self._flush()
        if not end_is_told:  # so each gradient may be the last one
            self._backward_ended()

    def _flush(self) -> None:
        self._hand_over(wait_follows=False)

    def _backward_ended(self) -> None:
        """Waits for the averages if all gradients are made. May be called again when nothing has happened since."""
        if not self._active:
            return
        for slot in self._watch_unfrozen():
            if slot.parameter.grad is not None:
                slot.queued = True
                self._queued += 1
                self._buckets.add(slot)
        if not self._all_made.said and self._has_made_all():
            try:
                self._hand_over(wait_follows=True)
                self._start_parts_of_groups()
                self._say_made(complete=True, quiet=True)
                with in_place_of_script():
                    everywhere = self._all_made.everywhere()
                    if everywhere:
                        self._finish()
            except BaseException:
                self.reset()
                raise
            if everywhere:
                self.reset()
                self._averaged = True
                for slot in self._slots.values():
                    slot.remember()
                return
        else:
            self._flush()
            if not self._all_made.said:
                self._undecided_in = current()
                UNDECIDED[id(self)] = weakref.ref(self)
        self._over = True
        for slot in self._slots.values():
            slot.allow_changes(alone=True)

    def _has_made_all(self) -> bool:
        slots = self._slots.values()
        return self._queued == len(slots) or all(slot.queued or not slot.parameter.requires_grad for slot in slots)

    def say_incomplete(self) -> None:
        """This rank waits for something else while gradients of this step are missing."""
        if not self._all_made.said and self._undecided_in is current():
            self._say_made(complete=False, quiet=False)

    def _say_made(self, complete: bool, quiet: bool) -> None:
        if not self.enabled:
            return  # a rank outside of the set has no number for it
        op = Average if self._op == Average else Sum
        number = set_number(self._process_set, "Allreduce")
        spec = reduction(OpType.ALLREDUCE, op, self._prescale, self._postscale, number)
        self._all_made.say(complete, spec, set_size(self._process_set) == 1, quiet)

    def _hand_over(self, wait_follows: bool) -> None:
        self._buckets.hand_over(self._start, self._start_group, wait_follows)

    def _start(self, slot: Slot, quiet: bool) -> None:
        gradient = slot.parameter.grad
        assert gradient is not None
        slot.hand_over(gradient)
        if gradient.layout is not torch.strided:
            slot.sparse_dim = gradient.sparse_dim()
            if not self._sparse_as_dense:
                wait = sparse_allreduce_async(gradient, slot.name, self._op, self._process_set)
                slot.finish = lambda: slot.store(wait())
                return
        if self._same is not None:
            self._same.before(slot.parameter, gradient)
        travelling, restore = self._pack(gradient)
        if self._in_rounds is not None:
            rounds = Rounds(self._in_rounds, slot.name, travelling, self._submit)
            self._start_rounds(slot, rounds, travelling, restore, quiet)
            return
        handle = self._submit(travelling, slot.wire, quiet)
        if restore is None:
            slot.finish = lambda: slot.store(synchronize(handle))
        else:
            slot.finish = lambda: slot.store(restore(synchronize(handle)))

    def _submit(self, travelling: torch.Tensor, wire: str, quiet: bool) -> Handle:
        spec = COLLECTIVES.reduction(travelling, self._op, self._prescale, self._postscale, self._process_set)
        try:
            return current().engine.submit(spec, wire, (travelling,), travelling, READER, wait_follows=quiet)
        except ValueError:
            try:
                COLLECTIVES.framework.view(travelling)
            except ValueError as refusal:
                raise ValueError(
                    f"The gradient of {wire.removeprefix('allreduce.')!r} can't be reduced: {refusal}"
                ) from None
            raise

    def _start_rounds(
        self,
        slot: Slot,
        rounds: Rounds,
        dense: torch.Tensor,
        restore: Callable[[torch.Tensor], torch.Tensor] | None,
        quiet: bool,
    ) -> None:
        def go_on(quiet: bool = True) -> bool:
            reduced = rounds.advance(quiet)
            slot.allow_changes(alone=False)  # the compressor may have used the memory of the gradient
            if reduced is None:
                return True
            if restore is not None:
                slot.store(restore(reduced))
            elif reduced is not dense:
                dense.copy_(reduced)  # the memory of the gradient
            return False

        slot.finish = go_on if go_on(quiet) else None

    def _start_group(self, group: Group[Slot], quiet: bool) -> None:
        packed = []
        for slot in group.slots:
            gradient = slot.parameter.grad
            assert gradient is not None
            if gradient.layout is not torch.strided and not self._sparse_as_dense:
                raise ValueError(
                    f"The gradient of parameter {slot.name!r} is sparse, but groups reduce dense gradients only. "
                    "Leave the parameter out of groups, or pass sparse_as_dense=True."
                )
            if self._same is not None:
                self._same.before(slot.parameter, gradient)
            slot.hand_over(gradient)
            packed.append(self._pack(gradient))
        handle = COLLECTIVES.start_allreduces(
            [travelling for travelling, _ in packed],
            True,
            self._op,
            group.slots[0].name,
            self._prescale,
            self._postscale,
            self._process_set,
            quiet,
        )

        def finish() -> None:
            for slot, reduced, (_, restore) in zip(group.slots, synchronize(handle), packed, strict=True):
                slot.store(reduced if restore is None else restore(reduced))

        group.slots[0].finish = finish

    def _pack(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor] | None]:
        """What travels for `gradient`, and how to get a gradient of its form back (None: it travelled itself)."""
        if self._compression is None and gradient.layout is torch.strided and gradient.is_contiguous():
            return gradient.detach() if gradient.requires_grad else gradient, None
        with torch.no_grad():
            travelling = gradient.detach()
            sparse_dim = None
            if travelling.layout is not torch.strided:
                sparse_dim = travelling.sparse_dim()
                travelling = travelling.to_dense()
            travelling = travelling.contiguous()
            compression = self._compression or NoneCompressor
            travelling, context = compression.compress(travelling)

        def restore(reduced: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                dense = compression.decompress(reduced, context)
                if sparse_dim is not None:
                    return _to_sparse(dense, sparse_dim)
                return gradient.copy_(dense)

        return travelling, restore

    # -- the end of a step --------------------------------------------------------------------------------------------
    @property
    def in_flight(self) -> bool:
        """Whether gradients are on their way, so that they must not be touched."""
        return self._active

    @property
    def averaged(self) -> bool:
        """Whether a backward pass has waited for all averages, and `synchronize` has nothing to do."""
        return self._averaged

    def synchronize(self) -> None:
        """Reduces what no hook made ready, waits for everything and leaves the reduced gradients in `.grad`.

        Raises AssertionError: the script has changed a gradient in flight. The others are reduced.
        """
        if self._averaged:
            self.forget_averages()
            return
        UNDECIDED.pop(id(self), None)
        self._watch_unfrozen()
        self._active = True
        try:
            for slot in self._slots.values():
                if not slot.queued and slot.parameter.requires_grad:
                    if slot.parameter.grad is None:
                        slot.parameter.grad = slot.zeros()
                    slot.queued = True
                    self._buckets.add(slot)
            self._hand_over(wait_follows=True)
            self._start_parts_of_groups()
            if not self._all_made.said:
                self._say_made(complete=True, quiet=True)
            self._finish()
        finally:
            self.reset()

    def _watch_unfrozen(self) -> list[Slot]:
        """Those that were frozen when they were given, and are no more."""
        unfrozen = [pair for pair in self._frozen if pair[1].requires_grad]
        if not unfrozen:
            return []
        self._frozen = [pair for pair in self._frozen if not pair[1].requires_grad]
        self.watch(unfrozen)
        return [self._slots[id(parameter)] for _, parameter in unfrozen]

    def _start_parts_of_groups(self) -> None:
        for group in self._groups:
            # A member that was frozen meanwhile has no gradient of its own; the group needs it all the same.
            if 0 < group.missing < len(group.slots):
                for slot in group.slots:
                    if slot.parameter.grad is None:
                        slot.parameter.grad = slot.zeros()
                self._start_group(group, True)
                group.missing = 0

    def _finish(self) -> None:
        """Waits for all that is in flight. AssertionError: the script has changed a gradient meanwhile."""
        slots = list(self._slots.values())
        changes = [(slot.name, change) for slot in slots if (change := slot.change(self._over))]
        unfinished = [slot.finish for slot in slots if slot.finish is not None]
        while unfinished:
            unfinished = [finish for finish in unfinished if finish()]
        self._all_made.wait()
        self.stale = False
        if self._same is not None:
            self._same.after()
            if self._same.over:
                self._same = None
        if changes:
            name, change = changes[0]
            more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
            raise AssertionError(
                f"The gradient of parameter {name!r}{more} was {change} while it was being reduced, {IN_FLIGHT}"
            )

    def forget_averages(self) -> None:
        """The script has taken what a backward pass waited for: the next synchronize() reduces anew."""
        self._averaged = False

    def reset(self) -> None:
        """Forgets what is in flight (the engine keeps the memory until it is done) and starts a new step."""
        UNDECIDED.pop(id(self), None)
        self._buckets.clear()
        self._queued = 0
        self._active = self._averaged = self._over = False
        self._end.forget()
        self._all_made.reset()
        for slot in self._slots.values():
            slot.end()
            slot.countdown = self.passes
        for group in self._groups:
            group.missing = len(group.slots)


def _to_sparse(dense: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """The rows of `dense` that are not all zeros; `dense.to_sparse(sparse_dim)` takes a hundred times as long.

    How many there are is the size of the result, so on a GPU the host waits for it.
    """
    indices = (dense.flatten(sparse_dim) if dense.ndim > sparse_dim else dense.unsqueeze(-1)).any(-1).nonzero().t()
    return torch.sparse_coo_tensor(
        indices, dense[tuple(indices)], dense.shape, is_coalesced=True, check_invariants=False
    )


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
