"""What scripts do wrong with a distributed optimizer, noticed where the user still knows what he did:

    a model on the wrong device             when its optimizer is made
    something else than an optimizer        there, and parameters that have no names
    two optimizers of the same parameters   in the first backward pass of both
    the same data on all ranks              in the first steps
    steps past the distributed optimizer    at each of them

Why a step would not be the same on all ranks otherwise is in step_errors.py.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Average, rank, size
from horovod.common.gradients import Taken, refuse
from horovod.common.script import level_of_the_script
from horovod.torch.internals import is_compiling
from horovod.torch.tensors import device_obstacle
from horovod.worker.runtime.context import current, is_member

if TYPE_CHECKING:
    from horovod.torch.reducer import GradientReducer


_NAMED = 3  # parameters that a message names; of more it tells only how many


def warn_of_wrong_devices(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Says which of these parameters have gradients that can't be reduced where they are, and what to do.

    Only a warning: the model may move before the first step. The step itself fails, with an error that names the
    gradient.
    """
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
            f"hvd.DistributedOptimizer: {len(names)} of {len(trained)} parameters are on device {device} "
            f"({which}), on which their gradients can't be reduced. A tensor there is on {device}, "
            f"{device_obstacle(device)} Make the optimizer after you have moved the model to its device.",
            stacklevel=3,
        )


_OPTIMIZER: Final = Taken(
    "an optimizer of torch.optim",
    "torch.optim.SGD(model.parameters(), lr=...)",
    (torch.optim.Optimizer,),
    "(model.parameters(), lr=...)",
)


def check_is_optimizer(optimizer: Any, function: str) -> None:
    """TypeError when it is none."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise refuse(optimizer, function, _OPTIMIZER)


def unnamed_parameters(optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """The sentence on parameters of the optimizer that `named` has no names for; "" where it has all."""
    known = {id(parameter) for _, parameter in named}
    unnamed = [
        f"parameter {index} of group {number}, of shape {_shape(parameter)}"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if id(parameter) not in known
    ]
    if not unnamed:
        return ""
    more = f" and {len(unnamed) - 3} more" if len(unnamed) > 3 else ""
    sentence = f"named_parameters has no names for {'; '.join(unnamed[:3])}{more}."
    if not named:
        return (
            f"{sentence} It is empty: model.named_parameters() is a generator, which can be read only once. If "
            "it was kept in a variable, it is used up. Call model.named_parameters() again, or keep "
            "list(model.named_parameters())."
        )
    return f"{sentence} Pass the named_parameters() of the model, or of all models, whose parameters the optimizer has."


def _shape(parameter: torch.Tensor) -> str:
    return "unknown" if torch.nn.parameter.is_lazy(parameter) else str(list(parameter.shape))


# -- two distributed optimizers with the same parameters ---------------------------------------------------------------
# Each reduces their gradients, in the same backward pass. An average that is averaged again stays what it was, so
# scripts may take turns with two optimizers of op=hvd.Average. It costs twice the traffic, which most do not mean: they
# wrap the optimizer anew and keep the old one. A sum that is summed again is wrong.

_reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


class Rivals:
    """The reducers that watched a parameter of `reducer` when that began to watch it.

    Most of them are gone by the next backward pass: `optimizer = hvd.DistributedOptimizer(...)` makes the new optimizer
    before it drops the old one.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = weakref.ref(reducer)
        self._names: weakref.WeakKeyDictionary[GradientReducer, str] = weakref.WeakKeyDictionary()
        _reducers.add(reducer)

    def look(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """These parameters are watched from now on."""
        reducer = self._reducer()
        assert reducer is not None
        others = [one for one in _reducers if one is not reducer and one.process_set is reducer.process_set]
        for name, parameter in named if others else ():
            for other in others:
                if other.watches(parameter):
                    self._names.setdefault(other, name)

    def check(self) -> None:
        """When gradients are there. Warns where another optimizer reduces them too, ValueError where that is wrong."""
        reducer = self._reducer()
        if not self._names or reducer is None:
            return
        gc.collect()  # an optimizer that nobody has any more may be in a cycle of references
        for other, name in list(self._names.items()):
            if not other.enabled:
                continue
            sentence = (
                f"The gradient of parameter {name!r} is reduced by two optimizers of hvd.DistributedOptimizer, so each "
                "backward pass reduces it twice."
            )
            if not (reducer.op == other.op == Average):
                more = "Only averages stay what they are. Drop one of the two (del optimizer), or use op=hvd.Average."
                raise ValueError(coded(TrainingCode.REDUCED_TWICE, f"{sentence} {more}"))
            more = "Drop the other one (del optimizer) if it is no longer used."
            warnings.warn(f"{sentence} {more}", stacklevel=level_of_the_script())
            # Gradients that the other one has averaged are the same on all ranks, which tells nothing of the data.
            for one in (reducer, other):
                one.compare_no_more()
        self._names.clear()


# -- the same data on all ranks, which a forgotten DistributedSampler causes -------------------------------------------
# It needs no communication: when the average over the ranks equals what a rank computed itself, step after step, then
# all ranks have computed the same, and all of them but one for nothing. The gradient of one parameter is compared in
# the first steps. On a GPU that is only queued: the outcome goes to the host by itself, and a later step looks at it
# when it is there.

STEPS = 3  # in a row, before anything is said
_MAX_ELEMENTS = 1 << 22  # of the gradient that is compared: a copy of it is made
_RTOL = 1e-5


class SameGradients:
    """`before` a gradient is reduced, `after` all are; `over` when there is nothing more to find out."""

    def __init__(self) -> None:
        self.over = False
        self._watched: torch.Tensor | None = None
        self._own: torch.Tensor | None = None
        self._steps = 0
        # On a GPU: whether all steps so far were the same; after the last one on its way to the host, until `_arrived`.
        self._outcome: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def before(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._arrived is not None or size() == 1:  # an elastic world may have lost all other ranks
            return
        # Of a matrix, because the gradient of a bias may say more about the loss than about the data.
        dense = gradient.layout is torch.strided
        if self._watched is None and dense and gradient.dim() >= 2 and 1 < gradient.numel() <= _MAX_ELEMENTS:
            self._watched = parameter
        if parameter is self._watched:
            self._own = gradient.detach().clone()

    def after(self) -> None:
        if self._arrived is not None:
            if self._arrived.query():  # type: ignore[no-untyped-call]
                self._end(bool(self._outcome))
            return
        own, self._own = self._own, None
        if self._watched is None or own is None:
            return  # nothing of it travelled in this step
        reduced = self._watched.grad
        self._steps += 1
        if reduced is None:
            self._end(False)
        elif own.is_cuda:
            self._compare_there(reduced, own)
        else:
            with torch.no_grad():
                same = bool(own.any()) and torch.allclose(reduced, own, rtol=_RTOL, atol=0.0)
            if not same or self._steps == STEPS:
                self._end(same)

    def _compare_there(self, reduced: torch.Tensor, own: torch.Tensor) -> None:
        """The same on a GPU, for which this thread does not wait: not even to end early."""
        with torch.no_grad():
            same = own.any() & torch.isclose(reduced, own, rtol=_RTOL, atol=0.0).all()
            self._outcome = same if self._outcome is None else self._outcome & same
            if self._steps == STEPS:
                self._outcome = self._outcome.to("cpu", non_blocking=True)  # to page-locked memory
                self._arrived = torch.cuda.current_stream(own.device).record_event()

    def _end(self, same: bool) -> None:
        self.over = True
        self._watched = None
        if same and rank() == 0:
            warnings.warn(
                f"In the first {STEPS} steps every rank computed the same gradients, so all of them seem to train on "
                "the same data. Give each rank its part, for example with DataLoader(sampler=DistributedSampler("
                "dataset, hvd.size(), hvd.rank())).",
                stacklevel=level_of_the_script(),
            )


# -- steps past the distributed optimizer, which do not wait for the other ranks ---------------------------------------
# The optimizer that hvd.DistributedOptimizer was given has the same parameters and state, so its step() works, and so
# does torch.optim.SGD.step(optimizer), or a wrapper or GradScaler that was given the original. With averages that
# backward() has waited for, such a step is the same on all ranks; with anything else each rank would train a model of
# its own. The two optimizers share their hooks, so one before each step sees all of them, but for steps that
# torch.compile has compiled, in which no hook runs.


class _Guard:
    """A hook before each step. `check` is a method, whose object is not kept alive."""

    def __init__(self, check: Callable[[], None] | None) -> None:
        self._check = (lambda: None) if check is None else weakref.WeakMethod(check)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Guard, (None,)  # a copied optimizer that takes its hooks along gets a guard of its own

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        # Another distributed optimizer may have been made of the same one.
        if is_compiling() or getattr(optimizer, "_hvd_stepping", False):
            return None
        check = self._check()
        if check is None or not is_member() or current().settings.different_weights == "ignore":
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            check()
            return None

        def checked() -> Any:
            loss = closure()
            check()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": checked}
        return (args[0], checked, *args[2:]), kwargs


def guard(original: torch.optim.Optimizer, check: Callable[[], None]) -> None:
    """Calls `check` before each step of `original`, or after each call of its closure, as long as its object lives.

    check: a method. AssertionError: the step that begins now would not be the same on all ranks.
    """
    # The user's class does not call torch.optim.Optimizer.__init__, so the object has no hooks.
    if "_optimizer_step_pre_hooks" not in original.__dict__:
        return
    handle = original.register_step_pre_hook(_Guard(check))
    weakref.finalize(check.__self__, handle.remove).atexit = False  # type: ignore[attr-defined]


def is_guard(hook: object) -> bool:
    return isinstance(hook, _Guard)


def not_reduced(why: str) -> AssertionError:
    return AssertionError(
        coded(
            TrainingCode.NOT_REDUCED,
            "A step was taken past the optimizer that hvd.DistributedOptimizer returned (with the original optimizer, "
            f"or as torch.optim.SGD.step(optimizer)), {why}, so each rank would train its own model. Call "
            "optimizer.step() of the distributed optimizer, and give that to GradScaler and other wrappers. If each "
            "rank is meant to take its own steps, set HOROVOD_DIFFERENT_WEIGHTS=ignore.",
        )
    )
