"""Which launcher runs a job of `horovodrun`. A new one is a folder beside this file, or a module, and its line here."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from horovod.launch.asked import Asked

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


def launcher_of(asked: Asked) -> Launcher:
    """The launcher of this job."""
    found = (cast(Launcher, importlib.import_module(name)) for name in LAUNCHERS)
    return next(one for one in found if one.takes(asked))
