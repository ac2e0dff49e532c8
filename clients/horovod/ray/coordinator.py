"""The parts that make a process a rank on Ray: a place among the others of its host, GPUs, and the coordinator.

seated, visible_gpus, gpus_of_elastic   places, which are pure: all that is known is an argument
coordinator_for, membership             for code that places the workers itself: executors, and backends of Ray Train
Coordinator                             for a program that has its own actors, as ray.train.horovod does
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import ray
import ray.util

from horovod.base.settings import Settings, resolve, variables
from horovod.coordinator.core.ranks import Place, Seat, assign
from horovod.launch.job_environment import job_environment
from horovod.launch.own_coordinator import OwnCoordinator, host_names
from horovod.worker.rank_environment import JobOnHost, rank_environment
from horovod.worker.rank_environment import Place as AnyPlace

_OF_PLACE = ("cross_rank", "cross_size", "local_rank", "local_size")


@dataclass(frozen=True)
class Seated:
    """One rank: which actor it is, by its number in the order of starts, and its host."""

    actor: int
    host: str
    place: Place


def seated(nodes: Sequence[tuple[str, str]]) -> list[Seated]:
    """The ranks in their order: node by node, each in the order of its actors. nodes: of each actor, as above."""
    names = host_names(nodes)
    places = assign([Seat(str(number), names[node]) for number, (node, _) in enumerate(nodes)])
    assert not isinstance(places, str)  # nobody has asked for a rank
    return [Seated(int(place.member_id), names[nodes[int(place.member_id)][0]], place) for place in places]


def visible_gpus(of_ranks: Sequence[Sequence[str]]) -> list[str]:
    """The GPUs of all ranks of one host, so that the local rank indexes them: the first of each, then the others.

    >>> visible_gpus([["0", "1"], ["2", "3"]])
    ['0', '2', '1', '3']
    """
    return [gpu for turn in zip_longest(*of_ranks) for gpu in turn if gpu is not None]


def gpus_of_elastic(own: Sequence[str], others: Sequence[Sequence[str]], local_rank: int) -> list[str]:
    """The GPUs that a worker of an elastic job sees: those of its host that the job has now, so that its local rank is
    the number of its own. Workers that come later have others, so the lists of two workers differ.

    >>> gpus_of_elastic(["3"], [["0"], ["1"]], local_rank=1)
    ['0', '3', '1']
    """
    found = [gpu for gpu in visible_gpus(others) if gpu not in own]
    at = min(local_rank, len(found))
    return [*found[:at], *own, *found[at:]]


def coordinator_for(
    nodes: Iterable[str], settings: Settings, nics: Sequence[str], with_tls: bool = True
) -> OwnCoordinator:
    """A coordinator in this process. nodes: of all workers, by Ray's ids; none if they may be anywhere."""
    is_here = set(nodes) == {str(ray.get_runtime_context().get_node_id())}
    return OwnCoordinator(settings, None if is_here else str(ray.util.get_node_ip_address()), nics, with_tls)


def membership(
    coordinator: OwnCoordinator,
    job: str,
    environ: Mapping[str, str],
    host: str,
    size: int,
    place: AnyPlace,
    gpus: Sequence[str] = (),
    incarnation: int = 0,
) -> tuple[dict[str, str], str, str | None]:
    """The arguments of `worker.enter`, by which a process takes this place. The other ones are those of
    `rank_environment`.
    """
    address, token = coordinator.address, coordinator.token
    on = JobOnHost(environ, host, size, address, token, is_own=True, job=job)
    return rank_environment(on, place, gpus, incarnation), coordinator.certificate, coordinator.server_name


class Coordinator:
    """Register each worker, then ask for the variables of its environment.

    >>> coordinator = Coordinator(MiniSettings())
    >>> coordinator.register("gpu-1", node_id, world_rank=0)
    >>> coordinator.finalize_registration()
    {0: {'HOROVOD_CROSS_RANK': 0, 'HOROVOD_CROSS_SIZE': 1, 'HOROVOD_LOCAL_RANK': 0, 'HOROVOD_LOCAL_SIZE': 1}}
    >>> environment = coordinator.establish_rendezvous()

    The coordinator that members speak to runs in this process until `shutdown`, or until the process ends.
    """

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self._nodes: dict[int, tuple[str, str]] = {}  # by rank: node id and the name of the host
        self._running: OwnCoordinator | None = None

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """The worker of this rank is there."""
        self._nodes[world_rank] = node_id, hostname

    @property
    def world_size(self) -> int:
        """How many are registered."""
        return len(self._nodes)

    @property
    def hostnames(self) -> set[str]:
        """One name for each node; hosts of one name differ by a piece of their node's id."""
        return set(host_names(list(self._nodes.values())).values())

    @property
    def node_id_by_rank(self) -> dict[int, str]:
        """The node of each rank."""
        return {rank: self._nodes[rank][0] for rank in sorted(self._nodes)}

    @property
    def node_id_string(self) -> str:
        """As "id:2,other:1": how many ranks each node has."""
        ranks: dict[str, int] = defaultdict(int)
        for node in self.node_id_by_rank.values():
            ranks[node] += 1
        return ",".join(f"{node}:{count}" for node, count in ranks.items())

    def finalize_registration(self) -> dict[int, dict[str, int]]:
        """The variables that tell each rank its place among those of its node, and among nodes. As numbers: callers
        compare them, and `BaseHorovodWorker.update_env_vars` makes texts of them.
        """
        ranks = sorted(self._nodes)
        found = {}
        for seat in seated([self._nodes[rank] for rank in ranks]):
            place = variables(**{name: getattr(seat.place, name) for name in _OF_PLACE})
            found[ranks[seat.actor]] = {name: int(text) for name, text in place.items()}
        return dict(sorted(found.items()))

    def establish_rendezvous(self) -> dict[str, str]:
        """Starts the coordinator; the variables by which members find it.

        Variables are all that the caller passes on, so workers on other nodes have no certificate to know it by: the
        token goes to it in the clear, which the log says.
        """
        nics = sorted(self.settings.nics or ())
        environ = job_environment(os.environ, {}, self.settings.timeout_s, nics)
        nodes = self.node_id_by_rank.values()
        self._running = coordinator_for(nodes, resolve(environ), nics, with_tls=False)
        return environ | variables(coordinator=self._running.address, token=self._running.token)

    def shutdown(self) -> None:
        """Ends the coordinator; idempotent."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()
