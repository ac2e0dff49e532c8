"""Where scripts of earlier releases import the launcher from: it is horovod.launch.

`run` is horovod.run. Each module below says where its names live.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod.launch.function import run as run

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    # Late: run brings gRPC and the launcher, which get_env_rank_and_size and its likes do not need.
    if name == "run":
        from horovod.launch.function import run

        return run
    raise AttributeError(f"module 'horovod.runner' has no attribute {name!r}")
