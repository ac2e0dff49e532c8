"""A gradient on its way through a GradientCompressor: one reduction after the other, until the generator returns."""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch

from horovod.base.errors import TrainingCode, coded
from horovod.common.ops.handles import AnyHandle
from horovod.torch.compression import GradientCompressor
from horovod.torch.handles import synchronize
from horovod.torch.slots import Slot


class Rounds:
    """`advance` starts the next reduction. The first is known by the parameter's own name, as without compression, so
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
