"""What a distributed optimizer or tape is asked to do with gradients, checked once for every framework.

A `Reduction` is made by the functions that users call; who reduces (horovod.tensorflow.gradients,
horovod._keras.adapters) reads it.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from horovod.base.errors import OperationCode, TrainingCode, coded
from horovod.base.frameworks import FRAMEWORKS
from horovod.common import unreduced
from horovod.common.basics import Adasum, Average, Sum
from horovod.common.ops.specs import registered_number
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.worker.runtime.context import current

_LONGEST_GROUP_NAME: Final = 100
# Base classes of models, by the package and the name, since not every framework is imported.
_MODELS: Final = {model for framework in FRAMEWORKS for model in framework.models}


def identity(variable: Any) -> int:
    """Equal for a keras.Variable and the framework's variable in it. A holder of it must keep the variable alive."""
    value = getattr(variable, "value", variable)
    is_a_value = type(value).__module__.partition(".")[0] in ("jax", "jaxlib")  # JAX has values only, and new ones
    return id(variable if callable(value) or is_a_value else value)


@dataclass(frozen=True)
class Taken:
    """What a function takes, in words for a person who gave it something else."""

    kind: str  # such as "an optimizer of torch.optim"
    example: str  # how one is made
    classes: tuple[type, ...] = ()  # an object of one of these classes is expected
    arguments: str = "(...)"  # arguments with which these classes are made


def refuse(given: Any, function: str, taken: Taken, error: type[Exception] = TypeError) -> Exception:
    """The error for `given`, which is not what `function` takes."""
    remedy = f"{taken.kind}, such as {taken.example}"
    if given is None:
        found = "None"
    elif isinstance(given, type):
        is_right = issubclass(given, taken.classes)
        found = f"the class {given.__name__ if is_right else f'{given.__module__}.{given.__qualname__}'}"
        if is_right:
            remedy = f"an object of it: {given.__name__}{taken.arguments}"
    elif is_model(given):
        found = f"a {type(given).__name__}, which is a model"
    elif isinstance(given, str):
        found = f"the string {given!r}"
    elif inspect.isroutine(given):
        found = f"the function {given.__name__}"
        remedy += ", or what the function returns if it makes one"
    else:
        found = f"a {type(given).__module__}.{type(given).__qualname__}"
    return error(coded(TrainingCode.INVALID_ARGUMENT, f"{function} was given {found}. Pass {remedy}."))


def is_model(given: object) -> bool:
    """Whether it is a model, or a layer, of any framework."""
    return any((base.__module__.partition(".")[0], base.__name__) in _MODELS for base in type(given).__mro__)


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced. Raises ValueError or NotImplementedError for what contradicts itself."""

    compression: Any
    op: int = Average
    gradient_predivide_factor: float = 1.0
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: ProcessSet = global_process_set
    sparse_as_dense: bool = False
    device_dense: str = ""
    device_sparse: str = ""
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        if self.op not in (Average, Sum, Adasum):
            raise ValueError(
                coded(
                    OperationCode.UNKNOWN_REDUCTION,
                    f"op={self.op!r} is not one of hvd.Average, hvd.Sum and hvd.Adasum.",
                )
            )
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError(
                coded(
                    TrainingCode.CONTRADICTORY_ARGUMENTS, "gradient_predivide_factor not supported with op != Average."
                )
            )
        if self.op == Adasum and self.process_set is not global_process_set:
            raise NotImplementedError(
                coded(OperationCode.UNDEFINED_REDUCTION, "Adasum does not support non-global process sets.")
            )
        _check_groups(self.groups)
        unreduced.watch.over()

    @property
    def prescale(self) -> float:
        """What gradients are multiplied by before they are summed, and `postscale` after it."""
        return 1.0 / self.gradient_predivide_factor

    @property
    def postscale(self) -> float:
        return self.gradient_predivide_factor

    def communicates(self) -> bool:
        """Whether this rank reduces anything: it is a member, and not alone. An elastic job may grow.

        Raises ValueError before hvd.init(), or for a process set that is not registered.
        """
        context = current()
        if self.process_set is not global_process_set:
            registered_number(self.process_set, "hvd.DistributedOptimizer")
        return bool(self.process_set.included()) and (self.members() > 1 or context.settings.may_grow)

    def members(self) -> int:
        """The number of ranks over which gradients are reduced."""
        if self.process_set is global_process_set:
            return current().world.size
        return len(self.process_set.ranks or ())

    def parted(
        self, gradients: Sequence[Any], variables: Sequence[Any], local: set[int]
    ) -> tuple[list[Any], list[int]]:
        """The gradients, of which those of the variables in `local` are this rank's part; the places of the others."""
        results, places = list(gradients), []
        for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is not None and identity(variable) not in local:
                places.append(place)
            elif gradient is not None and self.scale_local_gradients:
                results[place] = gradient / self.members()
        return results, places

    def grouped(self, variables: Sequence[Any]) -> list[list[int]]:
        """The places of variables whose gradients are reduced as one operation; all places, each once."""
        places = range(len(variables))
        if not self.groups:
            return [[place] for place in places]
        if isinstance(self.groups, int):
            count = min(self.groups, len(variables))
            return [
                list(places[len(places) * part // count : len(places) * (part + 1) // count]) for part in range(count)
            ]
        where = {identity(variable): place for place, variable in enumerate(variables)}
        groups = [[where[identity(one)] for one in group if identity(one) in where] for group in self.groups]
        alone = set(places).difference(*groups)
        return [group for group in groups if group] + [[place] for place in sorted(alone)]


def name_of_group(names: Sequence[str]) -> str:
    """One that differs where ranks reduce different gradients as one operation, of which the shapes may be the same."""
    if len(names) == 1:
        return names[0]
    if len(whole := ",".join(names)) <= _LONGEST_GROUP_NAME:
        return whole
    digest = hashlib.blake2s(whole.encode(), digest_size=4).hexdigest()
    return f"{names[0]},and_{len(names) - 1}_more_{digest}"


def groups_of(groups: Any, num_groups: int) -> Any:
    """`groups`, or what was given under its old name."""
    if num_groups == 0:
        return groups
    warnings.warn(
        "Parameter `num_groups` has been replaced by `groups` and will be removed.", DeprecationWarning, stacklevel=3
    )
    return num_groups if groups is None else groups


def check_passes(backward_passes_per_step: int) -> None:
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise ValueError(
            coded(
                TrainingCode.INVALID_ARGUMENT,
                f"backward_passes_per_step must be a positive integer, not {backward_passes_per_step!r}.",
            )
        )


def _check_groups(groups: Any) -> None:
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0):
        return
    if isinstance(groups, int | str) or not isinstance(groups, Iterable):
        raise ValueError(
            coded(
                TrainingCode.INVALID_GROUPS, "groups should be a non-negative integer or a list of lists of variables."
            )
        )
    seen: set[int] = set()
    for group in groups:
        if not isinstance(group, list | tuple):
            raise ValueError(
                coded(
                    TrainingCode.INVALID_GROUPS,
                    f"groups must consist of lists of variables, but one element is a {type(group).__name__}.",
                )
            )
        for variable in group:
            if identity(variable) in seen:
                raise ValueError(coded(TrainingCode.INVALID_GROUPS, "A variable can only appear once in groups."))
            seen.add(identity(variable))
