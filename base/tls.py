"""What the two sides of TLS share: a handshake in memory, by which each side checks its files before it uses them, and
files without a name, for certificates that a program makes for itself.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable
from typing import Final

# OpenSSL's numbers (X509_V_ERR_*, x509_vfy.h).
NOT_YET_VALID: Final = 9
EXPIRED: Final = 10
OTHER_NAME: Final = 62
OTHER_ADDRESS: Final = 64

Stamp = tuple[tuple[int, int, int], ...]  # for each file: which file it is, when it was changed, how long it is


def stamp(names: Iterable[str | None]) -> Stamp:
    """Changes when one of these files does. OSError while one is missing."""
    found = (os.stat(name) for name in names if name)
    return tuple((status.st_ino, status.st_mtime_ns, status.st_size) for status in found)


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str | None = None) -> None:
    """One TLS connection in memory between the two. ssl.SSLError when a side would not have it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_side=False, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)


def unnamed_file(content: bytes) -> tuple[int, str]:
    """A file in memory that only this user can open: the descriptor, which its owner closes, and a path to it.

    It has no name, since no file with one would be removed when the process is killed. The path is good in this process
    and in those that inherit the descriptor.
    """
    descriptor = os.memfd_create("horovod-tls")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, content)
    return descriptor, f"/proc/self/fd/{descriptor}"


def no_password() -> str:
    raise ValueError("the key is protected by a password, which nobody could type in; store it without one")
