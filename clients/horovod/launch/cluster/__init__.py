"""Jobs on a cluster of agents: submitted, followed, listed and stopped through its coordinators."""

from __future__ import annotations

from horovod.base.errors import LaunchCode, coded
from horovod.launch.asked import Asked, RefusedError


def takes(asked: Asked) -> bool:
    """Whether the command line names a coordinator."""
    return asked.args.coordinator is not None


def launch(asked: Asked) -> int:
    """Runs the job; the exit code of the launcher."""
    args = asked.args
    if args.host_discovery_script is not None:
        sentence = (
            "--host-discovery-script and --coordinator exclude each other: a job on registered agents grows onto "
            "agents that register later, and --host-discovery-script has this launcher start agents."
        )
        raise RefusedError(coded(LaunchCode.CONFLICTING_OPTIONS, sentence))
    from horovod.launch.cluster.submission import launch_on_agents

    asked.check_stdin_elsewhere()
    named = asked.named_hosts()
    hosts = [(host.name, host.slots) for host in named or ()]
    asked.check_elastic(args.num_proc or sum(slots for _, slots in hosts), len(named) if named else None)
    return launch_on_agents(args, asked.environ, hosts)
