"""Which connections of this coordinator are to hosts that acknowledge nothing, as the kernel knows (sock_diag(7)).

A kernel acknowledges what comes for a process that is stopped, holds Python's GIL, or waits for a processor. So this
tells a host that is out of reach from a process that is slow, which no unanswered message could. gRPC keeps its sockets
to itself, but the kernel tells of all those of a port.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import struct
from collections.abc import Iterator
from urllib.parse import unquote

from horovod.base.setting import split_address

Address = tuple[str, int]

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3  # types of netlink messages
_ESTABLISHED = 1
_INFO = 2  # INET_DIAG_INFO: an attribute whose value is a struct tcp_info
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_MESSAGE_BYTES = 72  # size of a struct inet_diag_msg
_RETRANSMITS = 2  # offset of tcpi_retransmits: how often in a row something was sent again without an acknowledgement
_ANSWER_S = 1.0
_MOST_BYTES = 1 << 16

_log = logging.getLogger(__name__)


def address_of(peer: str) -> Address | None:
    """The address in gRPC's name for the other end of a connection, "ipv4:10.0.0.1:5000"; None where it is no IP."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    try:
        host, port = split_address(unquote(rest), "peer")
    except ValueError:
        return None
    return plain_host(host), port


def unacknowledged(port: int) -> set[Address]:
    """The other ends of connections to this port whose hosts acknowledge nothing for the time being. Empty where this
    kernel does not tell.
    """
    try:
        return {
            address
            for family in (socket.AF_INET, socket.AF_INET6)
            for address, retransmits in _connections(family, port)
            if retransmits > 0
        }
    except (OSError, struct.error):
        _log.debug("The kernel does not tell what is acknowledged.", exc_info=True)
        return set()


def _connections(family: int, port: int) -> Iterator[tuple[Address, int]]:
    """The other end of each, and how often in a row its kernel did not acknowledge what was sent to it."""
    ports = struct.pack("!HH", port, 0)
    request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 1 << _ESTABLISHED) + ports
    request += bytes(36) + b"\xff" * 8  # any addresses, any interface, no cookie
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_ANSWER_S)
        header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0)
        kernel.send(header + request)
        while True:
            answer = kernel.recv(_MOST_BYTES)
            place = 0
            while place + _HEADER.size <= len(answer):
                length, kind, *_ = _HEADER.unpack_from(answer, place)
                if kind in (_ERROR, _DONE):
                    return
                yield _parsed(family, answer[place + _HEADER.size : place + length])
                place += max((length + 3) & ~3, _HEADER.size)


def _parsed(family: int, message: bytes) -> tuple[Address, int]:
    (port,) = struct.unpack_from("!H", message, 6)
    host = socket.inet_ntop(family, message[24 : 28 if family == socket.AF_INET else 40])
    retransmits, place = 0, _MESSAGE_BYTES
    while place + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, place)
        if kind == _INFO and length > 4 + _RETRANSMITS:
            retransmits = message[place + 4 + _RETRANSMITS]
        place += max((length + 3) & ~3, 4)
    return (plain_host(host), port), retransmits


def plain_host(host: str) -> str:
    """A socket that takes both kinds of addresses writes those of IPv4 in another way."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
