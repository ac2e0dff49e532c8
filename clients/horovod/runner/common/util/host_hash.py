"""Which processes are local to each other, where something else than horovodrun has placed them."""

from __future__ import annotations

import hashlib
import os
import socket


def host_name() -> str:
    """The name of this host, as errors show it."""
    return socket.gethostname()


def host_hash(salt: str | None = None) -> str:
    """Equal for processes of one host, and of one container of YARN, which is a host of its own. Stable.

    salt: makes another one of it, for what is to count as a host of its own.
    """
    parts = [host_name(), os.environ.get("CONTAINER_ID", ""), *([] if salt is None else [str(salt)])]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"{parts[0].split('.')[0]}-{digest}"
