"""Horovod: data-parallel training behind one small API.

Users import a framework's module (`import horovod.torch as hvd`). This package itself has only `__version__` and `run`;
importing it touches no framework, no native code and no environment variable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horovod.base.protocol import __version__

if TYPE_CHECKING:
    from horovod.launch.function import run as run

__all__ = ["__version__", "run"]


def __getattr__(name: str) -> Any:
    # horovod.run pulls in gRPC and the launcher, which a training process never needs.
    if name == "run":
        from horovod.launch.function import run

        return run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "run"])
