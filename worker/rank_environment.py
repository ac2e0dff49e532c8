"""What a process is told that a launcher starts as a rank: its place in the world becomes its environment.

Each of our launchers starts processes with what `rank_environment` makes: on this host, by agents, over ssh. Only then
do settings, logs and `hvd.init()` mean the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from horovod.base.settings import PARENT_WORLD, ROWS, resolve, variables

# Of the launcher itself: a rank has its own, or none. A launcher may itself be the child of a rank of another world.
_NOT_INHERITED: Final = (PARENT_WORLD, *(ROWS[name].env for name in ("token_file", "relay_socket", "incarnation")))
# What a user has set for other coordinators than the launcher's own.
_OF_OTHERS: Final = tuple(ROWS[name].env for name in ("tls_ca", "tls_cert", "tls_key", "tls_server_name"))


class Place(Protocol):
    """Of one rank in its world; `coordinator.core.ranks.assign` makes them."""

    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def cross_rank(self) -> int: ...
    @property
    def cross_size(self) -> int: ...


@dataclass(frozen=True)
class JobOnHost:
    """What is equal for all ranks of a job on one host.

    environ: of the launcher, with what the user has set for the job on top.
    size: of the world.
    token: that admits to the job; None: the one of the environment, if any.
    is_own: the coordinator is the launcher's own on the loopback interface, where it speaks no TLS.
    interfaces: over which the hosts reach each other, where the user named none.
    relay_socket: of the agent that speaks to the coordinator for the ranks; "" where they do so themselves.
    """

    environ: Mapping[str, str]
    host: str
    size: int
    coordinator: str
    token: str | None = None
    is_own: bool = False
    job: str | None = None
    interfaces: Sequence[str] = ()
    relay_socket: str = ""


def rank_environment(on: JobOnHost, place: Place, gpus: Sequence[str] = (), incarnation: int = 0) -> dict[str, str]:
    """The environment of one rank. ValueError for settings that make no sense.

    gpus: those that it may use, as CUDA_VISIBLE_DEVICES names them; empty: all.
    incarnation: which process of this rank it is, where the launcher counts them, from 1 on; 0: it does not.
    """
    left_out = (*_NOT_INHERITED, *_OF_OTHERS) if on.is_own else _NOT_INHERITED
    environ = {name: value for name, value in on.environ.items() if name not in left_out}
    named = resolve(environ).network_interfaces
    if interfaces := named or tuple(on.interfaces):
        # NCCL uses the same interfaces as our own connections. What a user said to NCCL itself stays.
        environ.setdefault("NCCL_SOCKET_IFNAME", ",".join(interfaces))
    told = {
        "coordinator": on.coordinator,
        "token": on.token,
        "job": on.job,
        "rank": place.rank,
        "size": on.size,
        "local_rank": place.local_rank,
        "local_size": place.local_size,
        "cross_rank": place.cross_rank,
        "cross_size": place.cross_size,
        "incarnation": incarnation or None,
        "hostname": on.host,
        "network_interfaces": interfaces if not named and interfaces else None,
        "relay_socket": on.relay_socket or None,
    }
    environ |= variables(**{name: value for name, value in told.items() if value is not None})
    if gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    environ["PYTHONUNBUFFERED"] = "1"  # lines appear when they are printed, although stdout is a pipe
    return environ
