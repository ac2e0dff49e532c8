"""Horovod: data-parallel training behind one small API.

Users import a framework's module (`import horovod.torch as hvd`). This package itself has only `__version__` and `run`;
importing it touches no framework, no native code and no environment variable.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod.launch import run as run

__all__ = ["__version__", "run"]

try:
    __version__ = metadata.version("horovod")
except metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "1.0.0.dev0"


def __getattr__(name: str) -> Any:
    # horovod.run pulls in gRPC and the launcher, which a training process never needs.
    if name == "run":
        from horovod.launch import run

        return run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "run"])
