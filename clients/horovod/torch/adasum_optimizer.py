"""The Adasum form of hvd.DistributedOptimizer: each rank takes its own step, and the steps are combined.

Adasum (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021) adds two vectors where they
are orthogonal and averages them where they are parallel. What is combined are the changes of the parameters, not the
gradients, so that momentum and adaptive learning rates act on each rank's own gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from horovod.common.basics import Adasum
from horovod.torch.compression import Compressor
from horovod.torch.handles import synchronize
from horovod.torch.ops import allreduce_async_

if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    _Base = object


def share_state(optimizer: torch.optim.Optimizer, original: torch.optim.Optimizer) -> None:
    """Loading made new groups and state. A scheduler that knows the optimizer as it was before must steer these."""
    original.param_groups = optimizer.param_groups
    original.state = optimizer.state


class AdasumOptimizer(_Base):
    """What the on-the-fly subclass adds. Comes first in the method resolution order, the user's class second."""

    _hvd_named: list[tuple[str, torch.Tensor]]
    _hvd_compression: type[Compressor]
    _hvd_original: torch.optim.Optimizer

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return {parameter: name for name, parameter in self._hvd_named}

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        return {parameter for _, parameter in self._hvd_named if parameter.requires_grad}

    @property
    def _handles(self) -> dict[torch.Tensor, Any]:
        """Empty: nothing travels but inside of `step`."""
        return {}

    def synchronize(self) -> None:
        """Does nothing: gradients stay local, and `step` waits for the combined changes itself."""

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """AssertionError: without the combination the ranks' parameters would part."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes this rank's own step, then combines the changes of all ranks; every rank must call it equally often."""
        self._hvd_original._opt_called = True  # type: ignore[attr-defined]  # for a scheduler made before the wrapping
        trained = [(name, parameter) for name, parameter in self._hvd_named if parameter.requires_grad]
        with torch.no_grad():
            before = [parameter.detach().clone() for _, parameter in trained]
        loss = super().step() if closure is None else super().step(closure)
        with torch.no_grad():
            handles = []
            for (name, parameter), start in zip(trained, before, strict=True):
                packed, context = self._hvd_compression.compress(parameter - start)
                parameter.copy_(start)  # also what remains if a rank is lost now
                handles.append((allreduce_async_(packed, name=f"adasum.{name}", op=Adasum), context))
            for (_, parameter), (handle, context) in zip(trained, handles, strict=True):
                parameter.add_(self._hvd_compression.decompress(synchronize(handle), context))
        return loss

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Nothing depends on it: gradients of several backward passes add up, and `step` says when to go on."""
        self.backward_passes_per_step = passes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state."""
        super().load_state_dict(state_dict)
        share_state(self, self._hvd_original)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, which take part from the next step on under default names."""
        super().add_param_group(param_group)
        group = len(self.param_groups) - 1
        for index, parameter in enumerate(self.param_groups[group]["params"]):
            self._hvd_named.append((f"noname.{group}.{index}", parameter))
