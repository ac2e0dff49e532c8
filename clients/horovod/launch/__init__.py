"""Launchers: the command `horovodrun` (__main__.py, commands.py) and the function `horovod.run` (function.py).

These entry points choose among the rooms, each of which is a way to start the processes of a job:

    local    on this machine, as children of the launcher
    cluster  on agents that are registered with a coordinator
    ssh      on hosts where the launcher starts agents by ssh; it is then the client of a cluster of its own, so this
             room imports cluster

Otherwise these rooms do not import each other. What they share imports none of them: `command_line` (options, the file
of settings), `console` (signals, streams, progress, the outcome), `elastic` (what is asked of an elastic job), and
beside the rooms certificates.py, observed.py and task.py, which is the program of a rank of `horovod.run`.
manual.py and settings_page.py make pages of docs/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import horovod.grpc_output  # noqa: F401 - before any module here imports gRPC

if TYPE_CHECKING:
    from horovod.launch.function import run as run

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    # Late: the ranks of horovod.run import this package too, for task.py, and need nothing of the launcher.
    if name == "run":
        from horovod.launch.function import run

        return run
    raise AttributeError(f"module 'horovod.launch' has no attribute {name!r}")
