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


def with_port(host: str, port: int) -> str:
    """HOST:PORT, with brackets around a numeric address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_LOOPBACK_DOWN = (
    "the loopback interface of this host (or of this network namespace) is down, and processes of one host find each "
    "other over it. Bring it up: `ip link set lo up`"
)
_NO_IPV4 = "this host (or this network namespace) has no loopback address for IPv4. Use that of IPv6: [::1]"


def loopback_host() -> str:
    """The numeric address at which processes of this host find each other: ::1 on a host without IPv4."""
    return "::1" if loopback_is_down("127.0.0.1") and _error_to("::1") == 0 else "127.0.0.1"


def loopback_listen() -> str:
    """HOST:PORT to listen where only processes of this host can connect, at a port that the system chooses."""
    return with_port(loopback_host(), 0)


def loopback_is_down(address: str) -> bool:
    """Whether no packet can be sent to this numeric loopback address. Nothing is sent.

    False if there is no socket to find out with, as without free file descriptors: who opens the next one says why.
    """
    return _error_to(address) in (errno.ENETUNREACH, errno.EADDRNOTAVAIL)


def why_loopback_is_down(address: str) -> str:
    """Why nothing can be sent to this numeric loopback address, and what to do, as the end of a sentence."""
    return _NO_IPV4 if ":" not in address and _error_to("::1") == 0 else _LOOPBACK_DOWN


def _error_to(address: str) -> int | None:
    """Number of the error that a packet to this numeric address would meet, 0 for none; None without a socket."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            return probe.connect_ex((address, 9))
    except OSError:
        return None
