"""Two distributed optimizers with the same parameters: each reduces their gradients, in the same backward pass.

An average that is averaged again stays what it was, so scripts may take turns with two optimizers of op=hvd.Average. It
costs twice the traffic, which most do not mean: they wrap the optimizer anew and keep the old one. A sum that is summed
again is wrong.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Average
from horovod.common.script import level_of_the_script

if TYPE_CHECKING:
    from horovod.torch.reducer import GradientReducer

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
