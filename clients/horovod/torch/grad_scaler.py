"""Whether torch's GradScaler calls. Unless it is disabled it divides gradients in place, and nothing shows that."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch

# PyTorch before 2.3 has one for CUDA only; later that one is a subclass.
_GRAD_SCALER: Final[Any] = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
_FRAMES_TO_GRAD_SCALER: Final = 6


def is_called_by_grad_scaler() -> bool:
    """Whether one called the optimizer's `step`, which asks, through what schedulers and profilers put around it."""
    frame = inspect.currentframe()
    for _ in range(_FRAMES_TO_GRAD_SCALER):
        frame = frame.f_back if frame is not None else None
        caller = frame.f_locals.get("self") if frame is not None else None
        if isinstance(caller, _GRAD_SCALER) and caller.is_enabled():
            return True
    return False
