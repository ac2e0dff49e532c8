"""Whether processes of this host can reach each other over its loopback interface."""

from __future__ import annotations

import errno
import socket

LOOPBACK_DOWN = (
    "the loopback interface of this host (or of this network namespace) is down, and processes of one host find each "
    "other over it. Bring it up: `ip link set lo up`"
)


def loopback_is_down(address: str) -> bool:
    """Whether no packet can be sent to this numeric loopback address. Nothing is sent.

    False if there is no socket to find out with, as without free file descriptors: who opens the next one says why.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            return probe.connect_ex((address, 9)) in (errno.ENETUNREACH, errno.EADDRNOTAVAIL)
    except OSError:
        return False
