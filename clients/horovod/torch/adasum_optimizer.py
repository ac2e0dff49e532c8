"""The Adasum form of hvd.DistributedOptimizer: each rank takes its own step, and the steps are combined.

Adasum (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021) adds two vectors where they
are orthogonal and averages them where they are parallel. What is combined are the changes of the parameters, not the
gradients, so that momentum and adaptive learning rates act on each rank's own gradients. That happens in step();
adasum_overlap.py does it beside the backward pass where the user asks for it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Adasum
from horovod.common.exceptions import HorovodInternalError
from horovod.common.same_weights import Exchange, SameWeights
from horovod.torch.adasum_overlap import REMEDY, StepsInBackward
from horovod.torch.compression import Compressor, GradientCompressor
from horovod.torch.handles import synchronize
from horovod.torch.internals import is_called_by_grad_scaler, untraced
from horovod.torch.misuse import guard, not_reduced
from horovod.torch.ops import allreduce_async_
from horovod.torch.same_weights import same_weights
from horovod.torch.wrapping import Named, WrappedOptimizer, named_group, share_state, tell_schedulers
from horovod.worker.runtime.context import current


class AdasumOptimizer(WrappedOptimizer):
    """What the on-the-fly subclass adds. Comes first in the method resolution order, the user's class second."""

    @functools.cached_property
    def _hvd_steps(self) -> StepsInBackward | None:
        """Made with the optimizer, but for one that was unpickled before hvd.init(): then when it is first needed."""
        guard(self._hvd_original, self._hvd_stepped_past)
        if not current().settings.adasum_overlap:
            return None
        steps = StepsInBackward(self, type(self._hvd_original), self._hvd_arguments.backward_passes_per_step)
        steps.watch(self._hvd_named)
        return steps

    @functools.cached_property
    def _hvd_same_weights(self) -> SameWeights:
        # State is each rank's own: it comes of its own gradients.
        return same_weights(
            self, AdasumOptimizer._hvd_trained, self._hvd_arguments.process_set, self._hvd_made, state=False
        )

    @functools.cached_property
    def _hvd_exchange(self) -> Exchange:
        return Exchange("", self._hvd_arguments.process_set)

    def _hvd_say(self) -> None:
        """Tells the other ranks what this one holds, in a step that has begun."""
        self._hvd_exchange.wire = f"adasum.{self._hvd_made.first()}.same"
        self._hvd_exchange.say(self._hvd_same_weights.digest())

    def _hvd_stepped_past(self) -> None:
        """Before a step past this optimizer: AssertionError."""
        raise not_reduced("and with op=hvd.Adasum only that one's step combines the changes of all ranks")

    def _hvd_trained(self) -> Named:
        return [(name, parameter) for name, parameter in self._hvd_named if parameter.requires_grad]

    def _hvd_compare(self) -> None:
        """ValueError: the ranks hold different weights, which is an error by a setting."""
        self._hvd_same_weights.take(self._hvd_exchange.hear(), self._hvd_exchange.wire)

    @property
    def _hvd_compression(self) -> type[Compressor]:
        compression = self._hvd_arguments.compression
        # Hvd.Adasum with a GradientCompressor was refused before.
        assert not isinstance(compression, GradientCompressor)
        return compression

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return {parameter: name for name, parameter in self._hvd_named}

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        return {parameter for _, parameter in self._hvd_named if parameter.requires_grad}

    @property
    def _handles(self) -> dict[torch.Tensor, Any]:
        """Whose changes are being combined; empty but where the setting HOROVOD_ADASUM_OVERLAP is on."""
        return {} if self._hvd_steps is None else dict(self._hvd_steps.in_flight)

    def synchronize(self) -> None:
        """Does nothing: gradients stay local, and `step` waits for the combined changes itself."""

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """AssertionError: without the combination the ranks' parameters would part."""
        raise AssertionError(
            coded(
                TrainingCode.UNSUPPORTED_OPTIMIZER,
                "Skipping synchronization is not supported when using Adasum optimizer.",
            )
        )

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes this rank's own step, then combines the changes of all ranks; every rank must call it equally often.

        With HOROVOD_ADASUM_OVERLAP it ends what the backward pass has begun. AssertionError: the script has changed
        gradients, parameters or options in between, or a GradScaler calls. ValueError: `param_groups` has a parameter
        that came past `add_param_group`.
        """
        tell_schedulers(self._hvd_original)
        known = {id(parameter) for _, parameter in self._hvd_named}
        self._hvd_check(lambda parameter: id(parameter) in known)
        if self._hvd_steps is not None:
            scaled = is_called_by_grad_scaler()
            with torch.enable_grad():
                result = None if closure is None else closure()
            self._hvd_steps.begin()
            self._hvd_say()
            self._hvd_compare()
            self._hvd_steps.finish(scaled)
            return result
        trained = self._hvd_trained()
        self._hvd_made.begin()
        self._hvd_say()
        with torch.no_grad():
            before = [parameter.detach().clone() for _, parameter in trained]
        self._hvd_stepping = True
        try:
            loss = super().step() if closure is None else super().step(closure)
        finally:
            self._hvd_stepping = False
        compression = self._hvd_compression
        with torch.no_grad():
            handles = []
            for (name, parameter), start in zip(trained, before, strict=True):
                packed, context = compression.compress(parameter - start)
                parameter.copy_(start)  # this value also remains if a rank is lost now
                wire = f"adasum.{self._hvd_made.label(name)}"
                handles.append((allreduce_async_(packed, name=wire, op=Adasum), context))
            self._hvd_compare()
            for (_, parameter), (handle, context) in zip(trained, handles, strict=True):
                parameter.add_(compression.decompress(synchronize(handle), context))
        self._hvd_made.end()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # else PyTorch runs the hooks around it when it loads state

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients. AssertionError where the backward pass has begun a step that has not ended."""
        if self._hvd_steps is not None and self._hvd_steps.in_flight:
            raise AssertionError(
                coded(
                    TrainingCode.ADASUM_OVERLAP,
                    "optimizer.zero_grad() was called after loss.backward() and before optimizer.step(). "
                    "GradScaler skips step() if gradients are infinite, but this step has begun already. "
                    f"{REMEDY}",
                )
            )
        if self._hvd_steps is not None:
            self._hvd_steps.restart()
        super().zero_grad(set_to_none)

    @untraced
    def set_backward_passes_per_step(self, passes: int) -> None:
        """Only the overlap depends on it: gradients of several passes add up, and `step` says when to go on."""
        self._hvd_arguments.backward_passes_per_step = self.backward_passes_per_step = passes
        if self._hvd_steps is not None:
            self._hvd_steps.set_passes(passes)

    @untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state. A step that has begun is not taken; waits for the changes that are in flight."""
        if self._hvd_steps is not None:
            # The words of this step must meet those of the other ranks, or the words of the next step would.
            if self._hvd_steps.is_awaited:
                with contextlib.suppress(ValueError, HorovodInternalError):
                    self._hvd_say()
                    self._hvd_compare()
                    self._hvd_steps.drop()
            self._hvd_steps.reset()
        super().load_state_dict(state_dict)
        share_state(self, self._hvd_original)
        self._hvd_same_weights.ask()

    @untraced
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, which take part from the next step on, under their names if the optimizer knows them."""
        super().add_param_group(param_group)
        added = named_group(self, self._hvd_named, "noname")
        self._hvd_made.add(name for name, _ in added)
        self._hvd_named += added
        self._hvd_same_weights.ask()
        if self._hvd_steps is not None:
            self._hvd_steps.watch(self._hvd_named)
