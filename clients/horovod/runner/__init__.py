"""Launchers: the command `horovodrun` (launch.py) and the function `horovod.run` (function.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import horovod.grpc_output  # noqa: F401 - before any module here imports gRPC

if TYPE_CHECKING:
    from horovod.runner.function import run as run

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    # Late: the ranks of horovod.run import this package too, for task.py, and need nothing of the launcher.
    if name == "run":
        from horovod.runner.function import run

        return run
    raise AttributeError(f"module 'horovod.runner' has no attribute {name!r}")
