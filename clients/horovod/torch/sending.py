"""How a gradient gets to the engine and back: as it is, compressed, sparse, in rounds, or with those of its group."""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch

from horovod.base.errors import TrainingCode, coded
from horovod.common.ops.buckets import Group
from horovod.common.ops.collectives import start_stand_in
from horovod.common.ops.framework import Indirect
from horovod.common.ops.handles import AnyHandle
from horovod.common.process_sets import ProcessSet
from horovod.torch.compression import Compressor, GradientCompressor, NoneCompressor
from horovod.torch.handles import synchronize
from horovod.torch.misuse import SameGradients
from horovod.torch.ops.sparse import sparse_allreduce_async
from horovod.torch.slots import Slot
from horovod.torch.tensors import COLLECTIVES, READER, is_plain, stand_in
from horovod.worker.runtime.context import current


class Sender:
    """Starts the reductions of gradients, and leaves in their slots what ends them."""

    def __init__(
        self,
        *,
        compression: type[Compressor] | GradientCompressor,
        op: int,
        gradient_predivide_factor: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        same: SameGradients | None,
    ) -> None:
        self._in_rounds = compression if isinstance(compression, GradientCompressor) else None
        self._compression: type[Compressor] | None = None
        if not isinstance(compression, GradientCompressor) and compression is not NoneCompressor:
            self._compression = compression
        self._op = op
        self._prescale = 1.0 / gradient_predivide_factor
        self._postscale = gradient_predivide_factor
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._same = same

    def finished(self) -> None:
        """All reductions of a step have ended."""
        if self._same is not None:
            self._same.after()
            if self._same.over:
                self._same = None

    def compare_no_more(self) -> None:
        """Says nothing of ranks that compute the same gradients."""
        self._same = None

    def start(self, slot: Slot, quiet: bool) -> None:
        gradient = slot.parameter.grad
        assert gradient is not None
        slot.hand_over(gradient)
        if gradient.layout is not torch.strided:
            slot.sparse_dim = gradient.sparse_dim()
            if not self._sparse_as_dense:
                wait = sparse_allreduce_async(gradient, slot.label, self._op, self._process_set)
                slot.finish = lambda: slot.store(wait())
                return
        if self._same is not None:
            self._same.before(slot.parameter, gradient)
        travelling, restore = self._pack(gradient)
        if self._in_rounds is not None:
            rounds = Rounds(self._in_rounds, slot, travelling, self._submit)
            self._start_rounds(slot, rounds, travelling, restore, quiet)
            return
        handle = self._submit(travelling, slot.wire, quiet)
        if restore is None:
            slot.finish = lambda: slot.store(synchronize(handle))
        else:
            slot.finish = lambda: slot.store(restore(synchronize(handle)))

    def _submit(self, travelling: torch.Tensor, wire: str, quiet: bool) -> AnyHandle:
        spec = COLLECTIVES.reduction(travelling, self._op, self._prescale, self._postscale, self._process_set)
        try:
            return current().engine.submit(spec, wire, (travelling,), travelling, READER, wait_follows=quiet)
        except Indirect as indirect:
            return start_stand_in(indirect, self._submit, wire, quiet, in_place=wire)
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
                dense.copy_(reduced)  # into the memory of the gradient
            return False

        slot.finish = go_on if go_on(quiet) else None

    def start_group(self, group: Group[Slot], quiet: bool) -> None:
        packed = []
        for slot in group.slots:
            gradient = slot.parameter.grad
            assert gradient is not None
            if gradient.layout is not torch.strided and not self._sparse_as_dense:
                raise ValueError(
                    coded(
                        TrainingCode.SPARSE_GRADIENT,
                        f"The gradient of parameter {slot.name!r} is sparse, but groups reduce dense gradients only. "
                        "Leave the parameter out of groups, or pass sparse_as_dense=True.",
                    )
                )
            if self._same is not None:
                self._same.before(slot.parameter, gradient)
            slot.hand_over(gradient)
            packed.append(self._pack(gradient))
        handle = COLLECTIVES.start_allreduces(
            [travelling for travelling, _ in packed],
            True,
            self._op,
            group.name,
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
        if self._compression is None and gradient.layout is torch.strided and is_plain(gradient):
            return gradient.detach() if gradient.requires_grad else gradient, None
        with torch.no_grad():
            dense = gradient.detach()
            sparse_dim = None
            if dense.layout is not torch.strided:
                sparse_dim = dense.sparse_dim()
                dense = dense.to_dense()
            travelling, write_back = stand_in(dense, in_place=True)
            compression = self._compression or NoneCompressor
            travelling, context = compression.compress(travelling)

        def restore(reduced: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                write_back(compression.decompress(reduced, context))
                return gradient if sparse_dim is None else _to_sparse(dense, sparse_dim)

        return travelling, restore


def _to_sparse(dense: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """The rows of `dense` that are not all zeros; `dense.to_sparse(sparse_dim)` takes a hundred times as long.

    How many there are is the size of the result, so on a GPU the host waits for it.
    """
    indices = (dense.flatten(sparse_dim) if dense.ndim > sparse_dim else dense.unsqueeze(-1)).any(-1).nonzero().t()
    return torch.sparse_coo_tensor(
        indices, dense[tuple(indices)], dense.shape, is_coalesced=True, check_invariants=False
    )


class Rounds:
    """A gradient on its way through a GradientCompressor: one reduction after the other, until the generator returns.

    `advance` starts the next reduction. The first is known by the parameter's own name, as without compression, so
    that a rank which compresses and one that does not get an error that names the tensor.
    """

    def __init__(
        self,
        compressor: GradientCompressor,
        slot: Slot,
        gradient: torch.Tensor,
        submit: Callable[[torch.Tensor, str, bool], AnyHandle],
    ) -> None:
        self._compressor = compressor
        self._name = slot.name
        self._wire = slot.wire
        self._gradient = gradient
        self._submit = submit
        self._count = 0
        self._handle: AnyHandle | None = None
        self._generator = compressor.reduce(slot.name, gradient)
        if not isinstance(self._generator, Generator):
            raise ValueError(
                coded(
                    TrainingCode.INVALID_COMPRESSOR,
                    f"{self._says()} is no generator; it must yield tensors to reduce and return the gradient.",
                )
            )

    def advance(self, quiet: bool) -> torch.Tensor | None:
        """Waits for the reduction under way and starts the next; the finished gradient when there is none.

        Raises:
            ValueError: the compressor yields or returns what it must not.
        """
        if self._handle is not None:
            synchronize(self._handle)
        try:
            with torch.no_grad():
                travelling = next(self._generator)
        except StopIteration as end:
            return self._checked(end.value)
        if not isinstance(travelling, torch.Tensor):
            raise ValueError(
                coded(
                    TrainingCode.INVALID_COMPRESSOR,
                    f"{self._says()} yields a {type(travelling).__name__}; it must yield tensors to reduce.",
                )
            )
        wire = self._wire if self._count == 0 else f"{self._wire}.round{self._count}"
        self._count += 1
        self._handle = self._submit(travelling, wire, quiet)
        return None

    def _checked(self, gradient: object) -> torch.Tensor:
        if not isinstance(gradient, torch.Tensor) or gradient.shape != self._gradient.shape:
            found = f"shape {list(gradient.shape)}" if isinstance(gradient, torch.Tensor) else type(gradient).__name__
            raise ValueError(
                coded(
                    TrainingCode.INVALID_COMPRESSOR,
                    f"{self._says()} returned {found}; it must return the reduced gradient, a tensor of shape "
                    f"{list(self._gradient.shape)}.",
                )
            )
        return gradient

    def _says(self) -> str:
        return f"{type(self._compressor).__name__}.reduce of parameter {self._name!r}"
