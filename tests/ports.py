"""Ports that a test may name."""

from __future__ import annotations

import pytest

from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.host import Interface
from horovod.worker.runtime.mesh import Listeners

LOOPBACK = [Interface("lo", ("127.0.0.1",))]


def free_ports(count: int) -> range:
    """So many adjacent ports that nobody uses now, out of the range from which the system chooses."""
    for first in range(20000, 30000, count):
        ports = range(first, first + count)
        try:
            for listeners in [Listeners(LOOPBACK, ports=[port]) for port in ports]:
                listeners.close()
        except StartError:
            continue
        return ports
    pytest.fail("There are no free ports.")
