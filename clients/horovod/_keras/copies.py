"""The copy of a distributed Keras optimizer, and of a model compiled with one, is distributed as well.

Keras copies (copy.deepcopy, pickle, clone_model) by saving and loading, and what it saves names the optimizer's own
class, so that files load without Horovod. The optimizer of a copy would be a plain one then, and train on the data of
its rank alone without a word. Hence the functions by which Keras copies are replaced, once; files stay as they are, and
for optimizers that are not distributed nothing changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from horovod._keras.optimizer import Distribution
from horovod.base.errors import TrainingCode, coded
from horovod.common.gradients import Reduction, identity
from horovod.common.optimizer_numbers import Made

_MARK = "_hvd_copies_are_distributed"

# Makes an optimizer a distributed one: distributed_keras (kinds.py), a function that pickle finds by its name.
Distribute = Callable[..., Any]


@dataclass(frozen=True)
class HowDistributed:
    """What makes the optimizer of a copy what the original is. Variables are their places among the model's."""

    reduction: Reduction  # its groups are no lists of variables
    passes: int
    average: bool
    depth: int  # number of optimizers, such as Keras's LossScaleOptimizer, around the distributed one
    groups: list[list[int]] | None
    local: list[int]
    made: Made
    distributed: Distribute

    @classmethod
    def of(cls, optimizer: Any, variables: Sequence[Any], distributed: Distribute) -> HowDistributed | None:
        """None: it is not distributed. ValueError: it knows variables that are not among these."""
        depth = 0
        while (distribution := getattr(optimizer, "_hvd", None)) is None:
            optimizer = getattr(optimizer, "inner_optimizer", None)
            depth += 1
            if optimizer is None:
                return None
        assert isinstance(distribution, Distribution)
        place = {identity(variable): number for number, variable in enumerate(variables)}
        reduction, groups = distribution.reduction, None
        listed = reduction.groups if not isinstance(reduction.groups, int) else None
        try:
            if listed is not None:
                groups = [[place[identity(variable)] for variable in group] for group in listed]
                reduction = replace(reduction, groups=None)
            local = [place[variable] for variable in distribution.local]
        except KeyError:
            raise ValueError(
                coded(
                    TrainingCode.NOT_DISTRIBUTED,
                    f"This {type(optimizer).__name__} has variables in `groups` or registered as local ones, and a "
                    "copy can't know which of its own these are. Copy the model that has the optimizer, after it is "
                    "built.",
                )
            ) from None
        passes, average = distribution.passes, distribution.average
        return cls(reduction, passes, average, depth, groups, local, distribution.made, distributed)

    def distribute(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Makes `optimizer`, of the copy with these variables, a distributed one."""
        for _ in range(self.depth):
            optimizer = optimizer.inner_optimizer
        reduction = self.reduction
        if self.groups is not None:
            groups = [[variables[place] for place in group] for group in self.groups]
            reduction = replace(reduction, groups=groups)
        self.distributed(optimizer, reduction, self.passes, self.average, made=copy.copy(self.made))
        for place in self.local:
            optimizer.register_local_var(variables[place])


def copied(load: Callable[..., Any], arguments: tuple[Any, ...], how: HowDistributed) -> Any:
    """The copy: what pickle and copy.deepcopy call."""
    loaded = load(*arguments)
    how.distribute(*_parts(loaded))
    return loaded


def _parts(owner: Any) -> tuple[Any, Sequence[Any]]:
    """The optimizer, and the variables of the model that has it; of an optimizer alone, itself."""
    return (owner, ()) if hasattr(owner, "apply_gradients") else (owner.optimizer, owner.trainable_variables)


def _how(owner: Any, distributed: Distribute) -> HowDistributed | None:
    if not (hasattr(owner, "apply_gradients") or getattr(owner, "optimizer", None) is not None):
        return None
    return HowDistributed.of(*_parts(owner), distributed)


class _CompileConfig(dict[str, Any]):
    """Of a model with a distributed optimizer. Written to a file it is what any model's is."""

    how: HowDistributed


def install_keras3(distributed: Distribute) -> None:
    """For the Keras that is imported."""
    import keras
    from keras.src.saving.keras_saveable import KerasSaveable

    reduce, get, compile_from = (
        KerasSaveable.__reduce__,
        keras.Model.get_compile_config,
        keras.Model.compile_from_config,
    )
    if hasattr(reduce, _MARK):
        return

    def __reduce__(self: Any) -> Any:  # noqa: N807
        is_ours = isinstance(self, (keras.Model, keras.optimizers.Optimizer))
        how = _how(self, distributed) if is_ours else None
        load, arguments = reduce(self)
        if how is None:
            return load, arguments
        if getattr(self, "_hvd", None) is not None:
            base: Any = type(self).__bases__[-1]
            load = base._unpickle_model  # pickle finds no class that was made at run time
        return copied, (load, arguments, how)

    def get_compile_config(self: Any) -> Any:
        config = get(self)
        if config is None or (how := _how(self, distributed)) is None:
            return config
        config = _CompileConfig(config)
        config.how = how
        return config

    def compile_from_config(self: Any, config: Any) -> Any:
        compile_from(self, config)
        if isinstance(config, _CompileConfig) and getattr(self, "optimizer", None) is not None:
            config.how.distribute(self.optimizer, self.trainable_variables if self.built else ())

    setattr(__reduce__, _MARK, True)
    KerasSaveable.__reduce__ = __reduce__
    keras.Model.get_compile_config = get_compile_config
    keras.Model.compile_from_config = compile_from_config


def install_tf_keras(keras: Any, distributed: Distribute) -> None:
    """For a Keras 2, where only models can be copied."""
    model = keras.Model
    reduce, deepcopy = model.__reduce__, model.__deepcopy__
    if hasattr(reduce, _MARK):
        return

    def __reduce__(self: Any) -> Any:  # noqa: N807
        how = _how(self, distributed) if self.built else None
        reduced = reduce(self)
        return reduced if how is None else (copied, (*reduced, how))

    def __deepcopy__(self: Any, memo: Any) -> Any:  # noqa: N807
        how = _how(self, distributed) if self.built else None
        twin = deepcopy(self, memo)
        if how is not None:
            how.distribute(*_parts(twin))
        return twin

    setattr(__reduce__, _MARK, True)
    model.__reduce__ = __reduce__
    model.__deepcopy__ = __deepcopy__
