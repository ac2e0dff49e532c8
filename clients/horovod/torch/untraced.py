"""What torch.compile runs as it is, without tracing it: code that talks to other ranks or keeps books about a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Whether torch.compile traces the caller. PyTorch has it in torch.compiler since 2.3.
is_compiling: Final[Callable[[], bool]] = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling


def untraced(function: _Function) -> _Function:
    """torch.compiler.disable for functions of a module, which imports the compiler of PyTorch only when one is called.

    Two frames of PyTorch stand between the function and its caller.
    """
    exporting: Any = torch  # torch has _disable_dynamo, but does not declare that it exports it
    return cast(_Function, exporting._disable_dynamo(function))
