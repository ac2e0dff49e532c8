"""Ports of this host for programs that want to be told theirs before they listen."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import Final

# Below the range from which Linux takes the local port of a connection (ip_local_port_range): no connection of another
# process can take a port of this range before the program listens there.
_PORTS: Final = range(20000, 32768)

_locks: Final[list[int]] = []  # of files; each lock keeps a port for this process until it ends


def free_ports(count: int) -> list[int]:
    """Ports on which no process listens. While this process lives, no other process gets them from this function."""
    folder = Path(tempfile.gettempdir()) / f"horovod-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(found) == count:
            break
        lock = os.open(folder / str(port), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as one:
                one.bind(("", port))
        except OSError:
            os.close(lock)
            continue
        _locks.append(lock)
        found.append(port)
    return found
