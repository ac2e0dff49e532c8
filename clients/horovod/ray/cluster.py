"""The cluster as elastic jobs see it: its hosts, and requests to an autoscaler if there is too little room.

A placement group that waits is a request: an autoscaler sees what is missing, and adds nodes. One group for each
missing worker, since not all have to come; a group whose resources have come is removed, as actors take them then.
Room on a host that is set aside is none for the job, so a request names the nodes on which it is not to be placed.
(request_resources() is one request for the whole cluster, of which the last caller's counts.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from horovod.base.errors import SettingCode, coded
from horovod.launch.elastic.discovery import HostDiscovery
from horovod.launch.elastic.times import period_s
from horovod.ray.adapter import BaseParams

_MOST = 64  # requests at one time

_log = logging.getLogger(__name__)


def slots_of(
    resources: Mapping[str, float], cpus: float, gpus: float, others: Mapping[str, float] | None = None
) -> int:
    """How many workers a node with these resources has room for. cpus, gpus, others: what each worker needs.

    >>> slots_of({"CPU": 8, "GPU": 2}, cpus=2, gpus=1)
    2
    """
    needs = {name: each for name, each in (("CPU", cpus), ("GPU", gpus), *(others or {}).items()) if each}
    return min((int(resources.get(name, 0) // each) for name, each in needs.items()), default=1)


class RayHostDiscovery(HostDiscovery):
    """The nodes of the cluster that are alive, with as many slots as each has processors, or GPUs, for workers.

    Their names are those under which their resources "node:<name>" place actors.
    """

    def __init__(
        self,
        use_gpu: bool = False,
        cpus_per_worker: int = 1,
        gpus_per_worker: int = 1,
        resources_per_worker: Mapping[str, float] | None = None,
    ) -> None:
        self._needs = cpus_per_worker, gpus_per_worker if use_gpu else 0, resources_per_worker

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Hosts without room for a worker are left out. Several nodes of one address are one host."""
        found: dict[str, int] = {}
        for node in ray.nodes():
            if node["alive"] and (slots := slots_of(node["Resources"], *self._needs)):
                name = node["NodeManagerAddress"]
                found[name] = found.get(name, 0) + slots
        return found


class TestDiscovery(RayHostDiscovery):
    """As RayHostDiscovery, with hosts that are taken away and given back at random, for tests of elastic programs."""

    __test__ = False  # no class of tests, whatever it is called

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int = 1,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        """Shows `min_hosts` to `max_hosts` of the nodes, and changes one every `change_frequency_s` seconds.

        use_gpu, cpus_per_slot, gpus_per_slot: as RayHostDiscovery. verbose: changes are logged. _graceful: False, which
        programs for earlier releases pass, is a warning: workers of a host that is taken away always leave in order.
        """
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)
        if not _graceful:
            sentence = "TestDiscovery(_graceful=False) has no effect: workers of a host that goes leave at a commit."
            warnings.warn(coded(SettingCode.UNSUPPORTED, sentence), stacklevel=2)
        self._verbose = verbose
        self._least, self._most, self._period_s = min_hosts, max_hosts, change_frequency_s
        self._shown: list[str] = []
        self._changes_at_s = float("-inf")

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """`min_hosts` to `max_hosts` of the cluster's hosts."""
        there: dict[str, Any] = super().find_available_hosts_and_slots()
        before = list(self._shown)
        self._shown = [name for name in self._shown if name in there]
        hidden = [name for name in there if name not in self._shown]
        if time.monotonic() >= self._changes_at_s:
            self._changes_at_s = time.monotonic() + self._period_s
            grows = random.random() < 0.5 if len(self._shown) > self._least else True
            if grows and hidden and len(self._shown) < self._most:
                self._shown.append(hidden.pop(random.randrange(len(hidden))))
            elif len(self._shown) > self._least:
                self._shown.remove(random.choice(self._shown))
        while hidden and len(self._shown) < self._least:
            self._shown.append(hidden.pop(0))
        if self._verbose and self._shown != before:
            _log.info("TestDiscovery: the hosts are now %s.", ", ".join(sorted(self._shown)) or "none")
        return {name: there[name] for name in self._shown}


class ResourceRequests:
    """The requests of one job. `keep` runs until it is cancelled."""

    def __init__(
        self, params: BaseParams, workers: int, slots: Callable[[], int], aside: Callable[[], Collection[str]]
    ) -> None:
        """workers: for so many there is to be room. slots: for how many there is, without the hosts `aside`."""
        self._bundle = params.bundle()
        self._workers, self._slots, self._aside = workers, slots, aside
        self._lock = threading.Lock()  # guards what follows
        self._groups: list[Any] = []
        self._is_over = False

    async def keep(self) -> None:
        try:
            while True:
                await asyncio.to_thread(self._look)
                await asyncio.sleep(max(period_s(), 0.1))
        finally:
            with self._lock:
                self._is_over = True
                self._keep(0)

    def _look(self) -> None:
        try:
            with self._lock:
                if self._is_over:
                    return
                for group in [one for one in self._groups if one.wait(0)]:
                    self._remove(group)
                self._keep(min(_MOST, self._workers - self._slots()))
        except Exception as error:  # the job runs on the room that there is
            _log.debug("Ray can't be asked for more room: %s", error)

    def _keep(self, count: int) -> None:
        if len(self._groups) < count:
            aside = self._aside()
            ids = [node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] in aside] if aside else []
            elsewhere = {"bundle_label_selector": [{"ray.io/node-id": f"!in({','.join(ids)})"}]} if ids else {}
            while len(self._groups) < count:
                self._groups.append(placement_group([self._bundle], **elsewhere))
        while len(self._groups) > max(0, count):
            self._remove(self._groups[-1])

    def _remove(self, group: Any) -> None:
        self._groups.remove(group)
        with contextlib.suppress(Exception):
            remove_placement_group(group)
