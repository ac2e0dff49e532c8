"""Where the gradient of one parameter stands on its way through a step, and whether the script changed it there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from horovod.common.optimizer_numbers import Made


class Slot:
    """One parameter of a GradientReducer."""

    __slots__ = (
        "address",
        "averaged",
        "countdown",
        "finish",
        "fired_in",
        "gradient",
        "group",
        "label",
        "name",
        "once",
        "parameter",
        "queued",
        "seen",
        "several_times",
        "sparse_dim",
        "version",
        "wire",
    )

    def __init__(self, name: str, parameter: torch.Tensor, countdown: int) -> None:
        self.name = name
        self.label = name  # the name by which other ranks know it
        self.wire = "allreduce." + name
        self.parameter = parameter
        self.countdown = countdown
        self.group: Any = None  # a Group of slots
        self.queued = False  # ready, and on its way to the engine
        self.fired_in = -1  # number of the backward pass that made the gradient last
        self.several_times = False  # whether some backward pass has made the gradient several times
        self.once = False  # whether each pass is known to make the gradient once
        self.seen: weakref.ref[torch.Tensor] | None = None  # the gradient as the last counted pass left it
        # Waits for the reduction and stores the gradient. Returns True if it has started another reduction; call it
        # again then.
        self.finish: Callable[[], bool | None] | None = None
        self.sparse_dim: int | None = None  # sparse dimensions of the last sparse gradient
        # While it is in flight: the gradient, where its memory is, and how often it was changed in place. The engine,
        # which knows addresses only, does not count as a change.
        self.gradient: torch.Tensor | None = None
        self.address = 0
        self.version = 0
        # After a backward pass that waited: the average, which must not be added to before the step.
        self.averaged: weakref.ref[torch.Tensor] | None = None

    def rename(self, made: Made) -> None:
        """made: of the optimizer."""
        self.label = made.label(self.name)
        self.wire = "allreduce." + self.label

    def hand_over(self, gradient: torch.Tensor) -> None:
        """The gradient is in flight from now on, and must stay as it is."""
        self.gradient = gradient
        self.address = _address(gradient)
        self.version = _version(gradient)

    def allow_changes(self, alone: bool) -> None:
        """What was done to it until now was done by us; with `alone` it may only have been done to other tensors.

        Tensors that are views of one memory count their changes together: the parts of what torch.cat was given get
        such gradients. Adding to one in the backward pass changes the number of all.
        """
        gradient = self.gradient
        if gradient is not None and (not alone or _shares_memory(gradient)):
            self.version = _version(gradient)

    def change(self, exact: bool) -> str | None:
        """What was done to the gradient in flight, as a verb. `exact`: allow_changes(alone=True) was called in time."""
        gradient = self.gradient
        if gradient is None:
            return None
        if self.parameter.grad is not gradient:
            return "replaced"
        if _address(gradient) != self.address:
            return "given other memory"
        if _version(gradient) != self.version and (exact or not _shares_memory(gradient)):
            return "changed"
        return None

    def store(self, gradient: torch.Tensor) -> None:
        if self.parameter.grad is not gradient:
            self.parameter.grad = gradient

    def end(self) -> None:
        """Nothing of it is in flight any more."""
        self.queued = False
        self.finish = None
        self.gradient = None
        self.averaged = None

    def note_pass(self) -> None:
        """A pass is counted."""
        gradient = self.parameter.grad
        dense = gradient is not None and gradient.layout is torch.strided
        self.seen = weakref.ref(gradient) if dense else None  # type: ignore[arg-type]

    def was_cleared(self) -> bool:
        """Whether the gradient that a pass has made now was None before, so that earlier passes do not count.

        Autograd adds to the tensor that is there, but in double backward or where one of the two is sparse.
        """
        gradient = self.parameter.grad
        if self.seen is None or gradient is None or torch.is_grad_enabled():
            return False
        return gradient.layout is torch.strided and self.seen() is not gradient

    def remember(self) -> None:
        """The average is there, though the script did not ask for it."""
        average = self.parameter.grad
        if average is not None:
            self.averaged = weakref.ref(average)
            self.version = _version(average)

    def was_added_to(self) -> bool:
        """Whether a backward pass has added to the average, and the script did nothing to it in between."""
        average = self.parameter.grad
        if average is None or self.averaged is None or self.averaged() is not average:
            return False
        return _version(average) == self.version + 1

    def zeros(self) -> torch.Tensor:
        """The gradient of a parameter that the loss did not use."""
        parameter = self.parameter
        if self.sparse_dim is None:
            return torch.zeros_like(parameter, requires_grad=False)
        shape = parameter.shape
        return torch.sparse_coo_tensor(
            parameter.new_empty((self.sparse_dim, 0), dtype=torch.int64),
            parameter.new_empty((0, *shape[self.sparse_dim :])),
            shape,
            check_invariants=False,
        )


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # the tensor was made in torch.inference_mode(), where changes are not counted
        return 0


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def _shares_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes
