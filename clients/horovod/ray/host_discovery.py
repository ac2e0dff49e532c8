"""The hosts of an elastic job as Ray sees them."""

from __future__ import annotations

import logging
import random
import time
import warnings
from collections.abc import Mapping
from typing import Any

import ray

from horovod.base.errors import SettingCode, coded
from horovod.launch.elastic.discovery import HostDiscovery

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


class ClusterHosts(HostDiscovery):
    """The nodes of the cluster that are alive, by the names under which their resources "node:<name>" place actors."""

    def __init__(self, use_gpu: bool, cpus: float, gpus: float, others: Mapping[str, float] | None = None) -> None:
        self._needs = cpus, gpus if use_gpu else 0, others

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Hosts without room for a worker are left out. Several nodes of one address are one host."""
        found: dict[str, int] = {}
        for node in ray.nodes():
            if node["alive"] and (slots := slots_of(node["Resources"], *self._needs)):
                name = node["NodeManagerAddress"]
                found[name] = found.get(name, 0) + slots
        return found


class ChangingHosts(ClusterHosts):
    """Some of the nodes, of which one is taken away or given back from time to time: for tests of elastic programs."""

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
        """From `min_hosts` to `max_hosts` of the hosts that there are."""
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
