"""The gradient reducer behind DistributedOptimizer: it reduces each gradient as soon as the backward pass has made it.

    hook fires, countdown 2 -> 1     local accumulation (backward_passes_per_step)
    hook fires, countdown 1 -> 0     the gradient is ready; with `groups`, the last member makes its group ready
    enough bytes are ready           they are handed to the engine, which reduces them while the backward pass goes on
    the backward pass ends           the rest is handed over
    synchronize()                    what no hook made ready (unused parameters: zeros) is handed over; waits for all,
                                     and goes on where a GradientCompressor reduces something else next

Small gradients are handed over together because waking the engine costs more than reducing one of them. Which gradients
share a hand-over has no influence on the result, and ranks need not agree on it: each gradient is its own operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from horovod._core import Handle
from horovod.common.basics import Average, Sum
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.compression import Compressor, GradientCompressor, NoneCompressor
from horovod.torch.handles import synchronize
from horovod.torch.ops.allreduce import start_group
from horovod.torch.ops.sparse import sparse_allreduce_async
from horovod.torch.ops.submit import ALLREDUCE, check_reduction, set_id
from horovod.torch.rounds import Rounds
from horovod.torch.same_gradients import SameGradients
from horovod.torch.tensors import READER, in_place_span
from horovod.worker.runtime.context import current

# Ready gradients are handed to the engine when they have this many bytes together.
HANDOVER_BYTES: Final = 1 << 20

TOO_MANY_PASSES: Final = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)


class _Slot:
    """One parameter and where its gradient stands."""

    __slots__ = ("countdown", "finish", "group", "name", "parameter", "queued", "sparse_dim", "wire")

    def __init__(self, name: str, parameter: torch.Tensor, countdown: int) -> None:
        self.name = name
        self.wire = "allreduce." + name
        self.parameter = parameter
        self.countdown = countdown
        self.group: _Group | None = None
        self.queued = False  # ready, and on its way to the engine
        # Waits for the reduction and stores the gradient. True: it has started another one; call it again.
        self.finish: Callable[[], bool | None] | None = None
        self.sparse_dim: int | None = None  # of the last sparse gradient


class _Group:
    """Parameters whose gradients are reduced as one operation."""

    __slots__ = ("missing", "slots")

    def __init__(self, slots: list[_Slot]) -> None:
        self.slots = slots
        self.missing = len(slots)
        for slot in slots:
            slot.group = self


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
        self._slots: dict[int, _Slot] = {}  # by id of the parameter, in the order of the names
        self._groups: list[_Group] = []
        self._waiting: list[_Slot] = []  # ready, not handed to the engine
        self._waiting_bytes = 0
        self._end_of_backward = False  # flush() is queued for the end of this backward pass
        self._hooks: list[Any] = []
        self._frozen: list[tuple[str, torch.Tensor]] = []
        self._active = False
        self.stale = False  # gradients were computed since the last synchronize()
        # An average of one rank, or one of what was made smaller, says nothing.
        comparable = enabled and op == Average and compression is NoneCompressor
        self._same = SameGradients() if comparable else None
        weakref.finalize(self, _remove, self._hooks).atexit = False

    # -- parameters ------------------------------------------------------------------------------------------------
    def watch(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Reduces these parameters' gradients from now on. Frozen ones join when they are unfrozen."""
        for name, parameter in named:
            if not parameter.requires_grad:
                self._frozen.append((name, parameter))
            elif id(parameter) not in self._slots:
                slot = _Slot(name, parameter, self.passes)
                self._slots[id(parameter)] = slot
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook(slot)))  # type: ignore[no-untyped-call]

    def group(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        """Reduces each group's gradients as one operation."""
        for parameters in groups:
            slots = [self._slots[id(parameter)] for parameter in parameters if id(parameter) in self._slots]
            if len(slots) > 1:
                self._groups.append(_Group(slots))

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        for slot in self._slots.values():
            slot.countdown = passes

    def _hook(self, slot: _Slot) -> Callable[[torch.Tensor], None]:
        # The parameter owns the hook: it must not keep the optimizer alive, nor reduce for one that is gone.
        reference = weakref.ref(self)

        def accumulated(_: torch.Tensor) -> None:
            reducer = reference()
            if reducer is None:
                return
            if slot.queued:
                raise AssertionError(TOO_MANY_PASSES)
            reducer.stale = True
            slot.countdown -= 1
            if slot.countdown <= 0:
                reducer._ready(slot)

        # Compiled autograd must call this as it is: what it does is outside of what can be traced.
        untraced: Callable[[torch.Tensor], None] = torch.compiler.disable(accumulated)  # type: ignore[no-untyped-call]
        return untraced

    # -- the way to the engine --------------------------------------------------------------------------------------
    def _ready(self, slot: _Slot) -> None:
        slot.queued = self._active = True
        self._waiting.append(slot)
        gradient = slot.parameter.grad
        assert gradient is not None
        self._waiting_bytes += gradient.nbytes if gradient.layout is torch.strided else HANDOVER_BYTES
        if self._waiting_bytes >= HANDOVER_BYTES:
            self._hand_over(wait_follows=False)
        elif not self._end_of_backward:
            self._end_of_backward = True
            try:
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
            except RuntimeError:  # no backward pass of this kind is running (compiled autograd)
                self._end_of_backward = False
                self._hand_over(wait_follows=False)

    def _backward_ended(self) -> None:
        self._end_of_backward = False
        self._hand_over(wait_follows=False)

    def _hand_over(self, wait_follows: bool) -> None:
        """Starts what waits. Only the last one wakes the engine, and none does when this thread waits next."""
        waiting, self._waiting = self._waiting, []
        self._waiting_bytes = 0
        started = 0
        try:
            for slot in waiting:
                quiet = wait_follows or started + 1 < len(waiting)
                if slot.group is None:
                    self._start(slot, quiet)
                elif slot.group.missing > 1:
                    slot.group.missing -= 1
                else:
                    self._start_group(slot.group, quiet)
                    slot.group.missing = 0
                started += 1
        finally:
            self._waiting[:0] = waiting[started:]  # after an error, synchronize() must not take them for reduced

    def _start(self, slot: _Slot, quiet: bool) -> None:
        gradient = slot.parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            slot.sparse_dim = gradient.sparse_dim()
            if not self._sparse_as_dense:
                wait = sparse_allreduce_async(gradient, slot.name, self._op, self._process_set)
                slot.finish = lambda: _store(slot.parameter, wait())
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
            slot.finish = lambda: _store(slot.parameter, synchronize(handle))
        else:
            slot.finish = lambda: _store(slot.parameter, restore(synchronize(handle)))

    def _submit(self, travelling: torch.Tensor, wire: str, quiet: bool) -> Handle:
        op = self._op
        if op != Average and op != Sum:
            op = check_reduction(op, travelling, self._process_set, "Allreduce")
        number = 0 if self._process_set is global_process_set else set_id(self._process_set, "Allreduce")
        try:
            return current().engine.submit(
                ALLREDUCE,
                wire,
                (travelling,),
                op,
                self._prescale,
                self._postscale,
                0,
                None,
                number,
                quiet,
                travelling,
                None,
                READER,
            )
        except ValueError:
            try:
                in_place_span(travelling)
            except ValueError as refusal:
                raise ValueError(
                    f"The gradient of {wire.removeprefix('allreduce.')!r} can't be reduced: {refusal}"
                ) from None
            raise

    def _start_rounds(
        self,
        slot: _Slot,
        rounds: Rounds,
        dense: torch.Tensor,
        restore: Callable[[torch.Tensor], torch.Tensor] | None,
        quiet: bool,
    ) -> None:
        def go_on(quiet: bool = True) -> bool:
            reduced = rounds.advance(quiet)
            if reduced is None:
                return True
            if restore is not None:
                _store(slot.parameter, restore(reduced))
            elif reduced is not dense:
                dense.copy_(reduced)  # the memory of the gradient
            return False

        slot.finish = go_on if go_on(quiet) else None

    def _start_group(self, group: _Group, quiet: bool) -> None:
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
            packed.append(self._pack(gradient))
        handle = start_group(
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
                _store(slot.parameter, reduced if restore is None else restore(reduced))

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

    def synchronize(self) -> None:
        """Reduces what no hook made ready, waits for everything and leaves the reduced gradients in `.grad`."""
        if self._frozen:
            frozen, self._frozen = self._frozen, []
            self.watch(frozen)
        slots = list(self._slots.values())
        self._active = True
        try:
            for slot in slots:
                if not slot.queued and slot.parameter.requires_grad:
                    if slot.parameter.grad is None:
                        slot.parameter.grad = _zeros(slot)
                    slot.queued = True
                    self._waiting.append(slot)
            self._hand_over(wait_follows=True)
            for group in self._groups:
                # A member that was frozen meanwhile has no gradient of its own; the group needs it all the same.
                if 0 < group.missing < len(group.slots):
                    for slot in group.slots:
                        if slot.parameter.grad is None:
                            slot.parameter.grad = _zeros(slot)
                    self._start_group(group, True)
            unfinished = [slot.finish for slot in slots if slot.finish is not None]
            while unfinished:
                unfinished = [finish for finish in unfinished if finish()]
            self.stale = False
            if self._same is not None:
                self._same.after()
                if self._same.over:
                    self._same = None
        finally:
            self.reset()

    def reset(self) -> None:
        """Forgets what is in flight (the engine keeps the memory until it is done) and starts a new step."""
        self._waiting.clear()
        self._waiting_bytes = 0
        self._end_of_backward = self._active = False
        for slot in self._slots.values():
            slot.queued = False
            slot.finish = None
            slot.countdown = self.passes
        for group in self._groups:
            group.missing = len(group.slots)


def _store(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if parameter.grad is not gradient:
        parameter.grad = gradient


def _zeros(slot: _Slot) -> torch.Tensor:
    """The gradient of a parameter that the loss did not use."""
    parameter = slot.parameter
    if slot.sparse_dim is None:
        return torch.zeros_like(parameter, requires_grad=False)
    shape = parameter.shape
    return torch.sparse_coo_tensor(
        parameter.new_empty((slot.sparse_dim, 0), dtype=torch.int64),
        parameter.new_empty((0, *shape[slot.sparse_dim :])),
        shape,
        check_invariants=False,
    )


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
