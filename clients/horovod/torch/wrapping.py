"""How a user's optimizer becomes a distributed one, and how copies and pickles of that are distributed ones too.

The result is an instance of a subclass made on the fly, which pickle can't find by name, and it has hooks on
parameters, which neither pickle nor copy.deepcopy takes along. So what they copy is the plain optimizer, the names of
its parameters and the arguments of hvd.DistributedOptimizer, of which another distributed optimizer is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from horovod.base.errors import TrainingCode, coded
from horovod.common.optimizer_numbers import Made
from horovod.common.process_sets import ProcessSet
from horovod.torch import unreduced
from horovod.torch.compression import Compressor, GradientCompressor

if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    _Base = object

Named = list[tuple[str, torch.Tensor]]


@dataclass
class Arguments:
    """Those of hvd.DistributedOptimizer, checked."""

    op: int
    process_set: ProcessSet
    backward_passes_per_step: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    compression: type[Compressor] | GradientCompressor
    groups: list[list[torch.Tensor]] | None = None  # the parameters of each group, as all ranks have agreed


_SHOWN = ("op", "process_set", "backward_passes_per_step", "gradient_predivide_factor", "sparse_as_dense")


class WrappedOptimizer(_Base):
    """What the two kinds of distributed optimizers have in common: what they were made of, and how they are copied.

    A copy made by copy.deepcopy or by pickle is distributed in the same way: it has the names, the process set and the
    other arguments of the original, and reduces the gradients of its own parameters, which are those of the copied
    model where both were copied together. It begins a new step. What is unpickled before hvd.init() is distributed from
    then on.
    """

    _hvd_original: torch.optim.Optimizer
    _hvd_named: Named
    _hvd_arguments: Arguments
    _hvd_wrap: Callable[..., Any]  # the function that made this object; pickle finds it by its name
    _hvd_made: Made
    _hvd_stepping = False  # whether it is inside step(), for misuse.py
    _hvd_checked: Sequence[int] = ()  # ids of the parameters that it had when they were last looked at
    backward_passes_per_step: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if "_hvd_original" not in self.__dict__:
            base = type(self).__bases__[-1]
            raise TypeError(
                coded(
                    TrainingCode.NOT_DISTRIBUTED,
                    f"{base.__name__}(...) was called with the class of a distributed optimizer, as "
                    f"type(optimizer)(...) does. Make a {base.__module__}.{base.__qualname__} and pass it to "
                    "hvd.DistributedOptimizer, or copy the distributed optimizer together with its model: "
                    "copy.deepcopy((model, optimizer)).",
                )
            )
        super().__init__(*args, **kwargs)

    def _hvd_check(self, watches: Callable[[torch.Tensor], bool]) -> None:
        """ValueError where a parameter was added to `param_groups`, or exchanged there, past this optimizer.

        Each rank would take steps with gradients of its own, and its parameter part from the others'.
        """
        now = [number for group in self.param_groups for number in map(id, group["params"])]
        if now == self._hvd_checked:
            return
        for place, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                may_have_gradient = parameter.is_floating_point() or parameter.is_complex()
                if may_have_gradient and not watches(parameter):
                    raise ValueError(
                        coded(
                            TrainingCode.UNKNOWN_PARAMETER,
                            f"Parameter {index} of group {place}, of shape {list(parameter.shape)}, was added to the "
                            "optimizer or exchanged in it after hvd.DistributedOptimizer was made, which does not "
                            "reduce its gradients. Add parameters with add_param_group() of the distributed "
                            "optimizer, or make that when the model has its final parameters.",
                        )
                    )
        self._hvd_checked = now

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _follow(self._hvd_original, self)
        numbers = self._hvd_made.numbers()
        return self._hvd_wrap, (self._hvd_original, self._hvd_named, self._hvd_arguments, True, numbers)

    def __copy__(self) -> Any:
        # It has the same parameters, so the same hooks serve it: with others each gradient would be reduced twice.
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.__dict__.pop("step", None)  # a learning-rate scheduler's step, which steps the first one
        return twin


def named_by_torch(groups: Iterable[dict[str, Any]]) -> Named | None:
    """The parameters of an optimizer that was made of `model.named_parameters()`; None where it knows no names."""
    groups = list(groups)
    names = [name for group in groups for name in group.get("param_names", ())]
    parameters = [parameter for group in groups for parameter in group["params"]]
    if len(names) != len(parameters) or len(set(names)) < len(names):
        return None
    return list(zip(names, parameters, strict=True))


def named_group(optimizer: torch.optim.Optimizer, known: Named, default: str) -> Named:
    """The parameters of the last group, which is new. default: begins their names where the optimizer has none."""
    number, group = len(optimizer.param_groups) - 1, optimizer.param_groups[-1]
    named = named_by_torch([group])
    if named is not None and not {name for name, _ in named} & {name for name, _ in known}:
        return named
    return [(f"{default}.{number}.{index}", parameter) for index, parameter in enumerate(group["params"])]


def adorn(original: torch.optim.Optimizer, addition: type, **attributes: Any) -> Any:
    """An instance of a class of `addition` and `original`'s own, which shares its groups and its state."""
    unreduced.watch.over()
    base = type(original)
    # Named as the user's, in a module of ours: some libraries look for "horovod" in str(type(optimizer)).
    distributed: Any = type(base.__name__, (addition, base), {"__module__": addition.__module__})
    # Not constructed anew: that would need the arguments of its own __init__ and would lose state and hooks.
    wrapped = object.__new__(distributed)
    wrapped.__dict__.update(original.__dict__)
    # A learning-rate scheduler made before has put its own `step` on the instance; it would bypass ours.
    wrapped.__dict__.pop("step", None)
    arguments = attributes["_hvd_arguments"]
    for name in _SHOWN:
        wrapped.__dict__.setdefault(name, getattr(arguments, name))
    wrapped.__dict__.update(attributes)
    wrapped._hvd_original = original
    return wrapped


def tell_schedulers(original: Any) -> None:
    """A step is taken: schedulers made before the wrapping look at the original optimizer and warn without one."""
    original._opt_called = True
    if hasattr(original, "_step_count"):  # PyTorch before 2.4, where the scheduler has put a counter there
        original._step_count += 1


def share_state(optimizer: torch.optim.Optimizer, original: torch.optim.Optimizer) -> None:
    """Loading made new groups and state. A scheduler that knows the optimizer as it was before must steer these."""
    original.param_groups = optimizer.param_groups
    original.state = optimizer.state


def _follow(original: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """A script may have given the distributed optimizer other values since, such as another `state`."""
    for name, value in optimizer.__dict__.items():
        ours = name.startswith("_hvd_") or name == "step" or (name in _SHOWN and name not in original.__dict__)
        if not ours:
            original.__dict__[name] = value
