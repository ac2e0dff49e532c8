"""Notices a model on the wrong device when its optimizer is made, where the user still knows what he did.

Only a warning: the model may move before the first step. The step itself fails, with an error that names the gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from horovod.torch.tensors import device_obstacle

_NAMED = 3  # parameters that a message names; of more it tells only how many


def warn_of_wrong_devices(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Says which of these parameters have gradients that can't be reduced where they are, and what to do."""
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    wrong: dict[torch.device, list[str]] = {}
    for name, parameter in trained:
        if device_obstacle(parameter.device) is not None:
            wrong.setdefault(parameter.device, []).append(name)
    for device, names in wrong.items():
        which = ", ".join(repr(name) for name in names[:_NAMED])
        if len(names) > _NAMED:
            which += f" and {len(names) - _NAMED} more"
        warnings.warn(
            f"hvd.DistributedOptimizer: {len(names)} of {len(trained)} parameters are on device {device} ({which}), "
            f"where their gradients can't be reduced. A tensor there is on {device}, {device_obstacle(device)} "
            "Make the optimizer when the model is on its device.",
            stacklevel=3,
        )
