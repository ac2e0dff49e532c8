"""What a host may be called, and whether processes of this host reach each other over its loopback interface.

No name is resolved here.
"""

from __future__ import annotations

import errno
import socket

_LABEL_CHARACTERS = 63  # RFC 1035, section 2.3.4
_NAME_CHARACTERS = 253  # the same, without the length bytes of the wire


def wrong_host_name(name: str) -> str:
    """Why no host can have this name, as a part of a sentence; "" if one can. Numeric addresses pass.

    Python's resolver raises UnicodeError for such names, with a text about a codec.
    """
    if not name.isascii():
        return "it has characters other than ASCII (an internationalised name is written as xn--...)"
    labels = name.removesuffix(".").split(".")
    if not all(labels):
        return "a part of it, between dots, is empty"
    if (longest := max(map(len, labels))) > _LABEL_CHARACTERS:
        return f"a part of it has {longest} characters, and at most {_LABEL_CHARACTERS} are allowed between two dots"
    if len(name) > _NAME_CHARACTERS:
        return f"it has {len(name)} characters, and at most {_NAME_CHARACTERS} are allowed"
    return ""


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
