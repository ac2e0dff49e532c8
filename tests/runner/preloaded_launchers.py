"""What launchers have imported when they are forked, and how one becomes what `python -m horovod.launch` is."""

from __future__ import annotations

import functools
import os
import signal
import sys

from horovod.launch import __main__ as command
from horovod.launch.console import report
from horovod.launch.local import job

PRELOADED = (job, report)  # which the launcher imports when its command line was right
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # of the tests, not of a launcher


def forked(descriptors: list[int], arguments: list[str], folder: str, graces: dict[str, float]) -> None:
    """The launcher with these arguments in `folder`; its standard streams are `descriptors`.

    graces: arguments of its Supervisor, for tests that would wait for them.
    """
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(folder)
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [folder, *given, *(entry for entry in sys.path if entry not in _PATHS)]
    sys.argv[:] = [str(command.__file__), *arguments]
    if graces:
        job.Supervisor = functools.partial(job.Supervisor, **graces)  # type: ignore[assignment, misc]
    command.run_commandline()
