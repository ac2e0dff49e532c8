"""Whether autograd must see a call."""

from __future__ import annotations

import torch


def needs_gradient(*tensors: torch.Tensor) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:  # not any(): its generator takes longer than all the rest
            if getattr(tensor, "requires_grad", False):
                return True
    return False
