"""Where scripts of earlier releases import the discovery of hosts from, which is in horovod.launch.elastic.discovery.

HostManager is here alone, since only they use it: it keeps the hosts in their order and sets aside those that fail, as
horovod/coordinator/core/elastic/hosts.py decides. A job of today does so in horovod/launch/elastic/driver.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from horovod.common.host_news import HostUpdateResult
from horovod.coordinator.core.elastic import hosts as core
from horovod.coordinator.core.elastic.hosts import Cooldown
from horovod.launch.elastic.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript

__all__ = ["DiscoveredHosts", "FixedHosts", "HostDiscovery", "HostDiscoveryScript", "HostManager"]


@dataclass(frozen=True)
class DiscoveredHosts:
    """The hosts that may be used, as they were at one time."""

    host_slots: Mapping[str, int]
    host_assignment_order: Sequence[str]  # those that have been there longest come first

    @property
    def available_hosts(self) -> set[str]:
        """Their names."""
        return set(self.host_assignment_order)

    def get_slots(self, host: str) -> int:
        """How many processes the host may run; 0 for one that may not be used."""
        return self.host_slots.get(host, 0)

    def count_available_slots(self) -> int:
        """How many processes all of them may run together."""
        return sum(self.host_slots.values())


class HostManager:
    """Follows a discovery: which hosts may be used, in a stable order. Used by one thread at a time.

    Args:
        discovery: finds the hosts.
        cooldown_range: the least and the most seconds for which `blacklist` sets a host aside; None: for good.
    """

    def __init__(self, discovery: HostDiscovery, cooldown_range: Sequence[float] | None = None) -> None:
        self._discovery = discovery
        self._hosts = core.Hosts(Cooldown(*cooldown_range) if cooldown_range is not None else None)

    @property
    def current_hosts(self) -> DiscoveredHosts:
        """The hosts of the last update, except hosts that are set aside. The value does not change any more."""
        usable = dict(self._hosts.usable)
        return DiscoveredHosts(usable, tuple(usable))

    def update_available_hosts(self) -> HostUpdateResult:
        """Asks the discovery, and says whether hosts or slots were added or removed. Raises what the discovery does."""
        found = self._discovery.find_available_hosts_and_slots()
        self._hosts, change, _ = core.look(time.monotonic(), self._hosts, found)
        result = HostUpdateResult.no_update
        if change.more:
            result |= HostUpdateResult.added
        if change.fewer:
            result |= HostUpdateResult.removed
        return result

    def blacklist(self, host: str) -> None:
        """Sets the host aside: it is no host of the job for as long as the cooldown lasts."""
        chance = random.random()
        self._hosts, _ = core.set_aside(time.monotonic(), self._hosts, host, chance)

    def is_blacklisted(self, host: str) -> bool:
        """Whether the host is set aside, as of the last update."""
        return host in self._hosts.aside

    @staticmethod
    def order_available_hosts(available_hosts: Iterable[str], prev_host_assignment_order: Sequence[str]) -> list[str]:
        """The hosts that are there, first those of the earlier order, in that order.

        >>> HostManager.order_available_hosts(["c", "a"], ["b", "a"])
        ['a', 'c']
        """
        return core.in_places(list(available_hosts), prev_host_assignment_order)
