"""How often launchers look for hosts. Programs change the values here, so they are read whenever they are used."""

from __future__ import annotations

DISCOVER_HOSTS_FREQUENCY_SECS = 1.0  # between two questions to a discovery of hosts
ELASTIC_TIMEOUT_SECS = 600  # for how long a job may have too few processes, unless HOROVOD_ELASTIC_TIMEOUT says it

__all__ = ["DISCOVER_HOSTS_FREQUENCY_SECS", "ELASTIC_TIMEOUT_SECS"]
