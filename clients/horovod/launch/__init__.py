"""Launchers: the command `horovodrun` (__main__.py, commands.py) and the function `horovod.run` (function.py).

launchers.py has the list of launchers, and the first that takes a job of `horovodrun` runs it:

    cluster  on agents that are registered with a coordinator
    ssh      on hosts where the launcher starts agents by ssh
    local    on this machine, as children of the launcher

`hosts` is for launchers that start agents on hosts for one run; each is then the client of a cluster of its own, so
hosts imports cluster, and the launcher only says how a line is run on another host. Otherwise launchers do not import
each other. `check` reads scripts and starts nothing. What they share imports none of them: `command_line` (options,
the file of settings), `console` (signals, streams, progress, the outcome), `elastic` (what is asked of an elastic job,
and the driver of hosts that come and go), and beside the rooms asked.py, own_agents.py, own_coordinator.py and task.py,
which is the program of a rank of `horovod.run`.
"""

import horovod.grpc_output  # noqa: F401 - before any module here imports gRPC
