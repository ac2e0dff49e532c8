"""Signatures as a person writes them: `op=Average`, where the default is 0.

hvd.Average and the others are plain numbers, which scripts print and pickle. Their names are wanted where nobody
computes with them: in help() and in the tooltips of notebooks, which ask inspect.signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import Any, Final

from horovod.common import basics

_NAMES: Final = {getattr(basics, name): name for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product")}


class _Reduction(int):
    """Equal to the number, and shown by its name."""

    def __repr__(self) -> str:
        return _NAMES[int(self)]


def name_reductions(namespace: Mapping[str, Any]) -> None:
    """For the functions and classes of a framework that have a reduction as the default of `op`."""
    for one in namespace.values():
        function = vars(one).get("__init__") if isinstance(one, type) else one
        if not isinstance(function, FunctionType) or not function.__module__.startswith("horovod."):
            continue
        if "op" not in function.__code__.co_varnames or not _has_number(function):
            continue
        signature = inspect.signature(function)
        named = [
            one.replace(default=_Reduction(one.default)) if one.name == "op" and type(one.default) is int else one
            for one in signature.parameters.values()
        ]
        function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]


def _has_number(function: FunctionType) -> bool:
    """Whether it could be so; inspect.signature takes ten times as long, at every start of a program."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return any(type(one) is int for one in defaults)
