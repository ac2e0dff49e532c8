"""What the ranks of a job are told by the agent that starts them."""

from __future__ import annotations

from collections.abc import Mapping

from horovod.protos.v1 import agents_pb2
from horovod.worker.agent.agent import Slot
from horovod.worker.agent.gpus import pinned
from horovod.worker.agent.relay import Relay
from horovod.worker.agent.threads import thread_variables
from horovod.worker.runtime.tls import ClientTls
from horovod.worker.settings import ROWS, resolve, variables

# Of the agent itself: a rank gets its own, or none.
_NOT_INHERITED = ("HOROVOD_TOKEN", "HOROVOD_TOKEN_FILE", "NOTIFY_SOCKET", "INVOCATION_ID", "JOURNAL_STREAM")


def inherited(own: Mapping[str, str]) -> dict[str, str]:
    """What of the agent's environment everything that it starts gets."""
    return {name: value for name, value in own.items() if name not in _NOT_INHERITED}


def slots_of(
    start: agents_pb2.StartShare, own: Mapping[str, str], *, coordinator: str, host: str, relay: Relay | None = None
) -> list[Slot]:
    """What to start for this share. ValueError for settings that make no sense, or GPUs that are not there.

    own: the agent's environment; the job's comes on top. relay: for ranks that believe the same coordinators.
    """
    environ = {**inherited(own), **start.environment}
    settings = resolve({name: value for name, value in environ.items() if name != ROWS["token_file"].env})
    if start.interfaces and not settings.network_interfaces:
        environ |= variables(network_interfaces=tuple(start.interfaces))
    interfaces = settings.network_interfaces or tuple(start.interfaces)
    if interfaces:  # NCCL uses the same as our own connections. What a user said to NCCL itself stays.
        environ.setdefault("NCCL_SOCKET_IFNAME", ",".join(interfaces))
    if settings.set_num_threads:
        environ |= thread_variables(environ, len(start.ranks))
    environ.pop(ROWS["token_file"].env, None)
    environ.pop(ROWS["relay_socket"].env, None)
    slots = []
    for placed in start.ranks:
        told = variables(
            coordinator=coordinator,
            job=start.job,
            rank=placed.rank,
            size=start.size,
            local_rank=placed.local_rank,
            local_size=placed.local_size,
            cross_rank=placed.cross_rank,
            cross_size=placed.cross_size,
            hostname=host,
        )
        if relay is not None and relay.path and settings.relay and relay.serves(ClientTls.of(settings)):
            told |= variables(relay_socket=relay.path)
        if start.token:
            told |= variables(token=start.token)
        if placed.gpus:
            told["CUDA_VISIBLE_DEVICES"] = ",".join(placed.gpus)
        told["PYTHONUNBUFFERED"] = "1"  # lines appear when they are printed, although stdout is a pipe
        slots.append(Slot(placed.rank, list(start.command), {**environ, **told}, start.directory or None))
    if settings.pin_gpus and not any(placed.gpus for placed in start.ranks):
        return pinned(slots)
    return slots
