"""Whether torch's GradScaler calls. Unless it is disabled it divides gradients in place, and nothing shows that."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch

# PyTorch before 2.3 has one for CUDA only; later that one is a subclass.
_GRAD_SCALER: Final[Any] = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
_FRAMES_TO_GRAD_SCALER: Final = 9  # three of these frames are of `untraced`


def is_called_by_grad_scaler() -> bool:
    """Whether one called the optimizer's `step`, which asks, through what schedulers and profilers put around it."""
    return calling_grad_scaler() is not None


def calling_grad_scaler() -> Any:
    """The one that called the optimizer's `step`, which asks; or None."""
    frame = inspect.currentframe()
    for _ in range(_FRAMES_TO_GRAD_SCALER + 1):
        frame = frame.f_back if frame is not None else None
        # Only there: a frame remembers what was asked of it, and the script's would keep optimizers alive.
        is_torchs = frame is not None and frame.f_globals.get("__name__", "").endswith("grad_scaler")
        caller = frame.f_locals.get("self") if frame is not None and is_torchs else None
        if isinstance(caller, _GRAD_SCALER) and caller.is_enabled():
            return caller
    return None
