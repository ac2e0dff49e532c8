"""The environment that an agent gives to the ranks which it starts."""

from __future__ import annotations

from collections.abc import Mapping

from horovod.base.settings import ROWS, resolve
from horovod.protos.v1 import agents_pb2
from horovod.worker.agent.gpus import pinned
from horovod.worker.agent.relay import Relay
from horovod.worker.agent.supervisor import Slot
from horovod.worker.agent.threads import thread_variables
from horovod.worker.rank_environment import JobOnHost, rank_environment
from horovod.worker.runtime.tls import ClientTls

# Variables of the agent itself. A rank gets values of its own for them, or none.
_NOT_INHERITED = ("HOROVOD_TOKEN", "HOROVOD_TOKEN_FILE", "NOTIFY_SOCKET", "INVOCATION_ID", "JOURNAL_STREAM")


def inherited(own: Mapping[str, str]) -> dict[str, str]:
    """The part of the agent's environment that every process which it starts inherits."""
    return {name: value for name, value in own.items() if name not in _NOT_INHERITED}


def slots_of(
    start: agents_pb2.StartShare, own: Mapping[str, str], *, coordinator: str, host: str, relay: Relay | None = None
) -> list[Slot]:
    """The ranks to start for this share of a job. ValueError for settings that make no sense or for missing GPUs.

    own: the agent's environment, to which that of the job is added. relay: given to ranks that know coordinators by
    the same TLS files as the relay does.
    """
    environ = {**inherited(own), **start.environment}
    settings = resolve({name: value for name, value in environ.items() if name != ROWS["token_file"].env})
    if settings.set_num_threads:
        environ |= thread_variables(environ, len(start.ranks))
    relayed = relay is not None and relay.path and settings.relay and relay.serves(ClientTls.of(settings))
    job = JobOnHost(
        environ,
        host,
        start.size,
        coordinator,
        token=start.token or None,
        job=start.job,
        interfaces=start.interfaces,
        relay_socket=relay.path if relay is not None and relayed else "",
    )
    slots = [
        Slot(
            placed.rank,
            list(start.command),
            rank_environment(job, placed, placed.gpus, placed.incarnation or 1),
            start.directory or None,
            incarnation=placed.incarnation or 1,
        )
        for placed in start.ranks
    ]
    if settings.pin_gpus and not any(placed.gpus for placed in start.ranks):
        return pinned(slots)
    return slots
