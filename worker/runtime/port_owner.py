"""Which users' processes listen on an address of this host, from the kernel's tables of TCP sockets."""

from __future__ import annotations

import ipaddress
import socket
import sys

# include/net/tcp_states.h. The tables have all sockets that listen first (Documentation/networking/proc_net_tcp.rst),
# before Linux 4.4 with half-open connections among them.
_LISTEN, _HALF_OPEN = "0A", "03"
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")  # proc(5): of this process's network namespace

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def addresses_of(host: str) -> list[str]:
    """The numeric addresses that a connection to `host` may go to; none when the name is unknown."""
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(row[4][0]).partition("%")[0] for row in rows))


def owners(addresses: list[str], port: int) -> set[int]:
    """User ids of the sockets that would accept a connection to one of `addresses`; empty when nothing listens there.

    Raises OSError where there is no such table.
    """
    listening = [one for table in _TABLES for one in _listening(table, port)]
    found: set[int] = set()
    for text in addresses:
        wanted = ipaddress.ip_address(text)
        exact = {user for address, user in listening if address == wanted}
        # A socket on the wildcard address gets what no other takes, one of IPv6 also connections of IPv4.
        wildcard = {
            user
            for address, user in listening
            if address.is_unspecified and (address.version == 6 or wanted.version == 4)
        }
        found |= exact or wildcard
    return found


def _listening(table: str, port: int) -> list[tuple[Address, int]]:
    """Address and user of every socket that listens on the port."""
    found = []
    try:
        with open(table, encoding="ascii") as file:
            next(file, "")  # names of columns
            for line in file:
                # "  0: 0100007F:72D8 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000  0 12345 ..."
                fields = line.split(maxsplit=8)
                if fields[3] not in (_LISTEN, _HALF_OPEN):
                    break  # a host has few sockets that listen, and thousands of connections where ranks have a mesh
                if fields[3] != _LISTEN:
                    continue
                address, _, number = fields[1].partition(":")
                if int(number, 16) == port:
                    found.append((_address(address), int(fields[7])))
    except FileNotFoundError:
        if not table.endswith("6"):  # there is no table of IPv6 where the kernel has none
            raise
    return found


def _address(text: str) -> Address:
    """The kernel prints the words of an address as numbers of this processor."""
    words = [bytes.fromhex(text[at : at + 8]) for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(word[::-1] if sys.byteorder == "little" else word for word in words))
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped if mapped is not None else address
