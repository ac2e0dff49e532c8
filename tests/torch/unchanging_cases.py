"""Frameworks whose tensors do not change, in the op matrix of op_cases.py: its calls in every form that the cases have.

Such a framework has no calls in place and none that return handles. Here both are the plain call, outside of compiled
functions for the one and in a compiled function for the other, so that the cases see results of both kinds.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np


class Box(ABC):
    """A tensor with what the cases ask of one."""

    is_cuda = False

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    def clone(self) -> Box:
        return type(self)(self.value)

    def cpu(self) -> Box:
        return self

    def numpy(self) -> np.ndarray:
        return np.asarray(self.value)

    def tolist(self) -> Any:
        return self.numpy().tolist()

    @abstractmethod
    def double(self) -> Box: ...

    @abstractmethod
    def __rmul__(self, factor: int) -> Box: ...


class Calls(ABC):
    """A framework's module, `hvd`, as the cases call it, for the ranks of a process set.

    tensor: the type that the boxes of the type `box` hold.
    """

    def __init__(self, hvd: ModuleType, tensor: type, box: type[Box], process_set: Any) -> None:
        self._hvd = hvd
        self._tensor = tensor
        self._box = box
        self._set = process_set
        self.in_functions = True
        self.is_set = process_set is not hvd.global_process_set

    def __getattr__(self, name: str) -> Any:
        plain = name.removesuffix("_").removesuffix("_async")
        value = getattr(self._hvd, plain)
        if not inspect.isfunction(value):
            return value

        def call(*given: Any, **options: Any) -> Any:
            if "process_set" in inspect.signature(value).parameters:
                options["process_set"] = self._set
            result = self._boxed(self.call(value, name, self._opened(given), options))
            if not name.endswith("_"):
                return result
            pairs = zip(given[0], result, strict=True) if isinstance(given[0], list) else [(given[0], result)]
            for box, one in pairs:
                box.value = one.value
            return given[0]

        return call

    @abstractmethod
    def call(self, function: Callable[..., Any], name: str, given: list[Any], options: dict[str, Any]) -> Any:
        """What `function` returns; in a compiled function where `name` is that of an asynchronous call."""

    def _opened(self, given: Any) -> Any:
        if isinstance(given, (list, tuple)):
            return [self._opened(one) for one in given]
        return given.value if isinstance(given, Box) else given

    def _boxed(self, result: Any) -> Any:
        if isinstance(result, (list, tuple)):
            return tuple(self._boxed(one) for one in result)
        return self._box(result) if isinstance(result, self._tensor) else result

    def synchronize(self, result: Any) -> Any:
        return result

    def rank(self) -> Any:
        return self._set.rank()

    def size(self) -> Any:
        return self._set.size()

    def global_rank(self, place: int) -> Any:
        return self._set.ranks[place]


def run_in_a_set(hvd: ModuleType, ranks: Sequence[int], run: Callable[[Any], None]) -> None:
    """`run(process_set)` on these ranks, while the others do something else."""
    chosen = hvd.add_process_set(ranks)
    if chosen.included():
        run(chosen)
    hvd.remove_process_set(chosen)
