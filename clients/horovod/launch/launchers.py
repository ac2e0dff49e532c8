"""Which launcher runs a job. A new one is a folder beside this file, or a module, and its line here."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from horovod.launch.asked import Asked, AskedFunction, InThread

# The first that takes a job runs it. Each is imported when it is asked, so that one which is not asked costs nothing.
LAUNCHERS = [
    "horovod.launch.cluster",
    "horovod.launch.ssh",
    "horovod.launch.local",
]


class Launcher(Protocol):
    """What a module of LAUNCHERS has. It imports gRPC and the like in `launch` only, after its checks: a mistake in the
    command line is answered at once.
    """

    def takes(self, asked: Asked) -> bool: ...
    def launch(self, asked: Asked) -> int: ...  # the exit code


class FunctionLauncher(Protocol):
    """What a module of LAUNCHERS has as well if `horovod.run` may use it."""

    def takes_function(self, asked: AskedFunction) -> bool: ...
    def run_function(self, asked: AskedFunction, in_thread: InThread) -> list[Any]: ...  # the results by rank


def launcher_of(asked: Asked) -> Launcher:
    """The launcher of this job of `horovodrun`."""
    found = (cast(Launcher, importlib.import_module(name)) for name in LAUNCHERS)
    return next(one for one in found if one.takes(asked))


def launcher_of_function(asked: AskedFunction) -> FunctionLauncher:
    """The launcher of this call of `horovod.run`."""
    modules = map(importlib.import_module, LAUNCHERS)
    found = (cast(FunctionLauncher, one) for one in modules if hasattr(one, "takes_function"))
    return next(one for one in found if one.takes_function(asked))
