"""Ranks and a coordinator for a program that places and starts its workers itself, as ray.train.horovod does."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import ray
import ray.util

from horovod.base.settings import resolve, variables
from horovod.launch.host_names import host_names
from horovod.launch.job_environment import job_environment
from horovod.launch.own_coordinator import OwnCoordinator
from horovod.ray.places import seated

_OF_PLACE = ("cross_rank", "cross_size", "local_rank", "local_size")


class Coordinator:
    """Register each worker, then ask for what its environment needs.

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
        nodes = set(self.node_id_by_rank.values())
        one_node = nodes == {str(ray.get_runtime_context().get_node_id())}
        here = None if one_node else str(ray.util.get_node_ip_address())
        self._running = OwnCoordinator(resolve(environ), here, nics, with_tls=False)
        return environ | variables(coordinator=self._running.address, token=self._running.token)

    def shutdown(self) -> None:
        """Ends the coordinator; idempotent."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()
