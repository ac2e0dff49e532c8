"""How often launchers look for hosts, and how long a job may have too few processes.

Programs change the values while they run, in horovod.runner.elastic.driver, which is this module: read them anew
whenever they are used.
"""

from __future__ import annotations

DISCOVER_HOSTS_FREQUENCY_SECS = 1.0  # between two questions to a discovery of hosts
ELASTIC_TIMEOUT_SECS = 600  # for how long a job may have too few processes, unless HOROVOD_ELASTIC_TIMEOUT says it


def period_s() -> float:
    """Between two questions to a discovery of hosts."""
    return max(0.0, float(DISCOVER_HOSTS_FREQUENCY_SECS))
