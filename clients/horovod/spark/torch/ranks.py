"""The work of the ranks of both TorchEstimators: that of horovod.spark.torch and that of horovod.spark.lightning.

Devices, learning rates, the buffers of a validation, and the loss of a batch: those of all labels together, weighted by
label and by row.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from horovod.base.errors import TrainingCode
from horovod.spark.common.params import refused
from horovod.spark.common.training import Trainer, Training, gpu_of_rank
from horovod.spark.torch.tensors import as_list, number

_RATES = ("lr", "initial_lr", "max_lr", "min_lr")


@dataclass(kw_only=True)
class ModuleTraining(Training):
    """model: pickled with its optimizer. checkpoint: of the run that goes on; None: it begins."""

    checkpoint: Any
    losses: Sequence[Callable[..., Any]] | None
    loss_constructors: Sequence[Callable[[], Any]] | None


class ModuleTrainer(Trainer):
    """A torch.nn.Module on one rank."""

    training: ModuleTraining
    device = torch.device("cpu")

    def choose_device(self) -> str:
        if self.training.use_gpu and torch.cuda.is_available():
            self.device = torch.device("cuda", gpu_of_rank())
        return self.device.type

    def unpickled(self) -> tuple[Any, Any]:
        """The model and its optimizer."""
        model, optimizer = pickle.loads(self.training.model)  # noqa: S301 - what the driver has sent
        return model, optimizer

    def losses(self) -> Losses:
        training = self.training
        functions = training.losses or [make() for make in training.loss_constructors or ()]
        return Losses(functions, training.loss_weights, self.device)


def scale_rates(groups: Sequence[dict[str, Any]], times: float = 1, over: float = 1) -> None:
    """The learning rates of an optimizer: in training those of one process times the number of ranks."""
    for group in groups:
        for name in _RATES:
            if name in group:
                group[name] = group[name] * times / over


def share_buffers(module: torch.nn.Module) -> None:
    """Gives all ranks the buffers of rank 0, which are saved: a rank's running means are of its own batches."""
    import horovod.torch as hvd

    hvd.broadcast_parameters(dict(module.named_buffers()), root_rank=0)


def same_shapes(outputs: Any, labels: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs as a list, and the labels with their shapes and types where they have as many numbers.

    A label of shape (rows,) beside an output of shape (rows, 1) would make a loss over all pairs of rows.
    """
    found = as_list(outputs)
    if len(found) != len(labels):
        raise refused(
            f"the model has {len(found)} outputs for {len(labels)} label columns: it must return a tensor for each.",
            TrainingCode.CONTRADICTORY_ARGUMENTS,
        )
    fitting = []
    for output, label in zip(found, labels, strict=True):
        is_same = label.shape != output.shape and label.numel() == output.numel()
        fitting.append(label.reshape(output.shape).to(output.dtype) if is_same else label)
    return found, fitting


class Losses:
    """Called with outputs, labels and the weights of rows, or None, it returns what backward() is called on."""

    def __init__(self, functions: Sequence[Callable[..., Any]], weights: Sequence[float] | None, device: Any) -> None:
        self._functions = [one.to(device) if isinstance(one, torch.nn.Module) else one for one in functions]
        self._weights = list(weights or [1.0] * len(functions))
        self._scale = 1.0
        self.last: float | None = None  # the loss before it was scaled; None until one was computed

    def scaled(self, scale: float) -> Losses:
        """This object, for a batch that counts `scale` times as much as another."""
        self._scale, self.last = scale, None
        return self

    def __call__(self, outputs: Any, labels: Sequence[Any], sample_weights: Any = None) -> Any:
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        total: Any = 0.0
        for function, weight, output, label in zip(self._functions, self._weights, outputs, labels, strict=True):
            loss = (
                function(output, label)
                if sample_weights is None
                else _weighted(function, output, label, sample_weights)
            )
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                number(loss, _name(function))
                raise refused(f"{_name(function)} must return a tensor: of a number there is no gradient.")
            total = total + loss * weight
        self.last = number(total, "the loss")
        return total if self._scale == 1.0 else total * self._scale


def _weighted(function: Callable[..., Any], output: Any, label: Any, weights: torch.Tensor) -> Any:
    """The mean over rows of loss times weight. The loss of a row is the mean over its numbers."""
    if isinstance(function, torch.nn.Module):
        if not hasattr(function, "reduction"):
            raise _unreduced(function)
        unreduced: Any = copy.copy(function)
        unreduced.reduction = "none"
        losses = unreduced(output, label)
    else:
        if not _takes_reduction(function):
            raise _unreduced(function)
        losses = function(output, label, reduction="none")
    return (losses.reshape(len(weights), -1).mean(1) * weights).mean()


def _takes_reduction(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return True
    return any(one.name == "reduction" or one.kind is one.VAR_KEYWORD for one in parameters)


def _name(function: Any) -> str:
    return f"the loss {getattr(function, '__name__', type(function).__name__)}"


def _unreduced(function: Any) -> ValueError:
    return refused(
        f"{_name(function)} can't be weighted by sample_weight_col: it must take reduction='none', as those of "
        "torch.nn.functional do, and return the losses of rows.",
        TrainingCode.CONTRADICTORY_ARGUMENTS,
    )
