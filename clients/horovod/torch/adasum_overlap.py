"""Adasum's combination beside the backward pass (HOROVOD_ADASUM_OVERLAP): the local step of a parameter in its hook.

    hook fires, the last of backward_passes_per_step   this rank's step of that parameter alone, on a copy of it; the
                                                       change of the copy is handed to the engine
    step()                                             the steps of what has had no hook; waits for the combined changes
                                                       and adds them

The parameter itself stays as it is until step(), so nothing that the pass still needs is changed under it.

A hook comes before the script may clip gradients, lets a GradScaler divide them or moves the learning rate, and then
the step has used other numbers than the script believes. So all that a step is made from must be the same in step():
the gradient (as slots.py sees it), the parameter and the options of its group. What is not is an error that names it;
the combined changes have been added then, as on all ranks. A step of one parameter must also be what it is within a
step of all: only classes of torch.optim of which that is known are accepted, and none with hooks around its steps.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import torch

from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Adasum
from horovod.common.ops.handles import AnyHandle
from horovod.torch.handles import synchronize
from horovod.torch.internals import EndOfBackward
from horovod.torch.misuse import is_guard
from horovod.torch.ops import allreduce_async_
from horovod.torch.slots import Slot
from horovod.worker.runtime.context import Context, current, is_member

if TYPE_CHECKING:
    from horovod.torch.adasum_optimizer import AdasumOptimizer

# Each keeps its numbers for each parameter and steps one as if there were no others. Not LBFGS, which steps along one
# line for all. A subclass may do anything, so the class must be one of these; older versions of PyTorch lack some.
_ONE_BY_ONE: Final = tuple(
    getattr(torch.optim, name)
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "Adagrad",
        "Adadelta",
        "ASGD",
        "Adafactor",
    )
    if hasattr(torch.optim, name)
)

REMEDY: Final = (
    "With HOROVOD_ADASUM_OVERLAP backward() takes a parameter's step as soon as its gradient is made. Without "
    "it scripts may clip gradients, use a GradScaler and set learning rates between backward() and step(): unset it, "
    "on all ranks."
)


def check_one_by_one(optimizer: torch.optim.Optimizer) -> None:
    """ValueError when it is not known that the optimizer can step each parameter by itself."""
    if type(optimizer) not in _ONE_BY_ONE:
        kind = type(optimizer)
        raise ValueError(
            coded(
                TrainingCode.UNSUPPORTED_OPTIMIZER,
                "HOROVOD_ADASUM_OVERLAP takes the step of each parameter separately, which may differ from a "
                f"whole step() of {kind.__module__}.{kind.__qualname__}. Unset it, or use one of "
                f"{', '.join(known.__name__ for known in _ONE_BY_ONE)} of torch.optim.",
            )
        )


class StepsInBackward:
    """Steps and combines the parameters of an AdasumOptimizer. Not thread-safe, but for hooks of several devices."""

    def __init__(self, optimizer: AdasumOptimizer, kind: type[torch.optim.Optimizer], passes: int) -> None:
        self.passes = passes
        self._optimizer = weakref.ref(optimizer)  # the optimizer that owns this object
        self._made = optimizer._hvd_made
        self._made.tell = weakref.WeakMethod(self._rename)
        self._has_begun = False  # a step
        self._world: weakref.ref[Context] | None = None  # the world in which the step has begun
        self._kind = kind  # the user's class of optimizer
        self._slots: dict[int, Slot] = {}  # id of a parameter -> its slot, in the order of the names
        # Id of a parameter that has stepped -> where it was, and its version.
        self._used: dict[int, tuple[int, int]] = {}
        self._group_of: dict[
            int, int
        ] = {}  # number of the group of each parameter, as the first step of a pass found it
        self._options: dict[int, dict[str, Any]] = {}  # by that number, as the first step of one of its parameters did
        self._handles: dict[int, tuple[AnyHandle, Any]] = {}  # with what decompress needs to know
        self._end = EndOfBackward(inner=self._pass_ended, outermost=self._pass_ended)
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def watch(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Steps these in their hooks from now on. Frozen ones join in the step after they are unfrozen."""
        for name, parameter in named:
            if parameter.requires_grad and id(parameter) not in self._slots:
                slot = Slot(name, parameter, self.passes)
                slot.rename(self._made)
                self._slots[id(parameter)] = slot
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook(slot)))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """A step begins, if none has."""
        if not self._has_begun:
            self._has_begun = True
            self._world = weakref.ref(current())
            self._made.begin()

    @property
    def is_awaited(self) -> bool:
        """Whether a step has begun in this world, in which other ranks wait for the changes of this one."""
        return self._has_begun and is_member() and self._world is not None and self._world() is current()

    def _rename(self) -> None:
        for slot in self._slots.values():
            slot.rename(self._made)

    @property
    def in_flight(self) -> dict[torch.Tensor, AnyHandle]:
        """The parameters that have stepped, each with the operation that combines its changes."""
        return {self._slots[key].parameter: handle for key, (handle, _) in self._handles.items()}

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        for slot in self._slots.values():
            slot.countdown = passes

    def restart(self) -> None:
        """The script clears the gradients, and no step has begun: passes are counted anew."""
        for slot in self._slots.values():
            slot.countdown = self.passes

    def reset(self) -> None:
        """Forgets what is in flight (the engine keeps the memory until it is done) and begins a new step."""
        self._handles.clear()
        self._used.clear()
        self._options.clear()
        self._end.forget()
        self._made.end()
        self._has_begun = False
        for slot in self._slots.values():
            slot.end()
            slot.countdown = self.passes

    # -- inside of backward() ------------------------------------------------------------------------------------------
    def _hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        # The parameter owns the hook: it must not keep the optimizer alive.
        reference = weakref.ref(self)

        def accumulated(_: torch.Tensor) -> None:
            steps = reference()
            if steps is None:
                return
            if slot.queued:
                raise AssertionError(
                    coded(
                        TrainingCode.TOO_MANY_PASSES,
                        f"A backward pass has made a gradient of parameter {slot.name!r}, which has already taken a "
                        "step in an earlier pass that no optimizer.step() has ended. For several passes in a step pass "
                        f"backward_passes_per_step. GradScaler skips steps. {REMEDY}",
                    )
                )
            if slot.was_cleared():
                slot.countdown = steps.passes
            slot.note_pass()
            slot.countdown -= 1
            if slot.countdown > 0:
                return
            if not steps._end.expect():
                raise AssertionError(
                    coded(
                        TrainingCode.ADASUM_OVERLAP, f"Compiled autograd does not tell when backward() ends. {REMEDY}"
                    )
                )
            steps._take(slot)

        # Compiled autograd must call this as it is: what it does is outside of what can be traced.
        untraced: Callable[[torch.Tensor], None] = torch.compiler.disable(accumulated)  # type: ignore[no-untyped-call]
        return untraced

    def _pass_ended(self) -> None:
        # Gradients that are parts of one memory count their changes together, and until now autograd has made some.
        for slot in self._slots.values():
            slot.allow_changes(alone=True)

    def _take(self, slot: Slot) -> None:
        """This rank's step of one parameter, on a copy, whose change is handed to the engine."""
        optimizer = self._optimizer()
        assert optimizer is not None
        parameter = slot.parameter
        self.begin()
        if not self._options:
            groups = enumerate(optimizer.param_groups)
            self._group_of = {id(one): number for number, group in groups for one in group["params"]}
        number = self._group_of[id(parameter)]
        group = optimizer.param_groups[number]
        if number not in self._options:
            self._options[number] = _options(group)
        with torch.no_grad():
            copy = parameter.detach().clone()
            if parameter.grad is not None:
                slot.hand_over(parameter.grad)
                copy.grad = parameter.grad
                self._step_copy(optimizer, group, parameter, copy)
            slot.queued = True
            self._used[id(parameter)] = (parameter.data_ptr(), parameter._version)
            packed, context = optimizer._hvd_compression.compress(copy.sub_(parameter))
            handle = self._submit(slot, packed)
        self._handles[id(parameter)] = (handle, context)

    def _step_copy(
        self, optimizer: AdasumOptimizer, group: dict[str, Any], parameter: torch.Tensor, copy: torch.Tensor
    ) -> None:
        """The user's class steps `copy` as it would `parameter`, whose state it uses and keeps."""
        if _has_step_hooks(optimizer):
            raise AssertionError(
                coded(
                    TrainingCode.ADASUM_OVERLAP,
                    "The optimizer has hooks around its steps (register_step_pre_hook or register_step_post_hook), "
                    f"which would run for each parameter. {REMEDY}",
                )
            )
        alone: Any = object.__new__(self._kind)
        alone.__dict__.update(optimizer.__dict__)
        alone.__dict__.pop("step", None)  # a learning-rate scheduler's, which counts
        alone._hvd_stepping = True
        alone.param_groups = [{**group, "params": [copy]}]
        alone.state = defaultdict(dict)
        if parameter in optimizer.state:
            alone.state[copy] = optimizer.state[parameter]
        alone.step()
        if copy in alone.state:
            optimizer.state[parameter] = alone.state[copy]

    # -- in step() -----------------------------------------------------------------------------------------------------
    def finish(self, called_by_grad_scaler: bool) -> None:
        """Steps what has had no hook, and adds the combined changes of all parameters.

        Raises AssertionError: a step in the backward pass was made from something that has changed since.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        self.watch(optimizer._hvd_named)
        try:
            change = self._change(optimizer)
            for slot in self._slots.values():
                if not slot.queued and slot.parameter.requires_grad:
                    self._take(slot)
            with torch.no_grad():
                for key, (handle, context) in self._handles.items():
                    self._slots[key].parameter.add_(optimizer._hvd_compression.decompress(synchronize(handle), context))
            if called_by_grad_scaler:
                raise AssertionError(
                    coded(
                        TrainingCode.ADASUM_OVERLAP,
                        f"GradScaler calls step(): the gradients were scaled when they were used. {REMEDY}",
                    )
                )
            if change is not None:
                raise AssertionError(
                    coded(TrainingCode.ADASUM_OVERLAP, f"{change} between backward() and optimizer.step(). {REMEDY}")
                )
        finally:
            self.reset()

    def drop(self) -> None:
        """Waits for the combined changes of all parameters, and adds none. To those that had no hook it adds zeros."""
        optimizer = self._optimizer()
        assert optimizer is not None
        for slot in self._slots.values():
            if not slot.queued and slot.parameter.requires_grad:
                packed, context = optimizer._hvd_compression.compress(torch.zeros_like(slot.parameter.detach()))
                self._handles[id(slot.parameter)] = (self._submit(slot, packed), context)
        for handle, _ in self._handles.values():
            synchronize(handle)

    @staticmethod
    def _submit(slot: Slot, packed: torch.Tensor) -> AnyHandle:
        return allreduce_async_(packed, name=f"adasum.{slot.label}", op=Adasum)

    def _change(self, optimizer: AdasumOptimizer) -> str | None:
        """What a step was made from and is no more, as a sentence without its end."""
        for key, slot in self._slots.items():
            if key not in self._used:
                continue
            if (change := slot.change(exact=True)) is not None:
                return f"The gradient of parameter {slot.name!r} was {change}"
            if (slot.parameter.data_ptr(), slot.parameter._version) != self._used[key]:
                return f"Parameter {slot.name!r} was changed"
        for number, options in self._options.items():
            now = _options(optimizer.param_groups[number])
            for name in options.keys() | now.keys():
                if options.get(name) != now.get(name):
                    return f"Option {name!r} of parameter group {number} was changed"
        return None


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """What a step depends on. A tensor, such as a learning rate, may be changed in place."""

    def seen(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [seen(item) for item in value]
        return (id(value), value._version) if isinstance(value, torch.Tensor) else value

    return {name: seen(value) for name, value in group.items() if name != "params"}


def _has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    module = sys.modules[torch.optim.Optimizer.__module__]
    own = (optimizer.__dict__.get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post"))
    everywhere = (getattr(module, f"_global_optimizer_{when}_hooks", None) for when in ("pre", "post"))
    return any(not is_guard(hook) for hooks in (*own, *everywhere) if hooks for hook in hooks.values())


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
