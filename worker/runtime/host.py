"""Who this host is: its name, what it shares memory with, and the network interfaces the data plane may use."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from horovod.base.addresses import loopback_is_down, why_loopback_is_down
from horovod.base.errors import WorldCode, coded
from horovod.base.processes import process_namespace
from horovod.base.setting import split_address, split_addresses
from horovod.worker.runtime.errors import StartError

# Interfaces that lead to containers or virtual machines of this host only; peers elsewhere have the same addresses.
_LOCAL_BRIDGES = ("docker", "br-", "virbr", "veth", "cni", "podman", "lxcbr", "lxdbr", "vmnet", "cali")
# linux/sockios.h and linux/if.h.
_SIOCGIFFLAGS = 0x8913
_IFF_RUNNING = 0x40


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]  # numeric, without link-local ones, which mean nothing to a peer
    is_up: bool = True

    @property
    def is_loopback(self) -> bool:
        return bool(self.addresses) and all(ipaddress.ip_address(a).is_loopback for a in self.addresses)

    @property
    def is_bridge(self) -> bool:
        return self.name.startswith(_LOCAL_BRIDGES)


def shared_memory_domain() -> str:
    """Equal for two processes exactly when they can open each other's segments: kernel, pid namespace and user."""
    namespace = process_namespace()
    if not namespace:  # no /proc: only the process itself is certain
        return f"pid {os.getpid()} of {socket.gethostname()}"
    return f"{namespace}/{os.getuid()}"


def interfaces() -> tuple[Interface, ...]:
    """The interfaces of this host in the kernel's order."""
    import psutil

    found = []
    for name, rows in psutil.net_if_addrs().items():
        texts = [row.address.partition("%")[0] for row in rows if row.family in (socket.AF_INET, socket.AF_INET6)]
        usable = tuple(text for text in texts if not ipaddress.ip_address(text).is_link_local)
        found.append(Interface(name, usable, is_up=_is_running(name)))
    return tuple(found)


def _is_running(interface: str) -> bool:
    """Not by psutil.net_if_stats, which asks each driver for its speed as well, and raises where that question is not
    known, as under qemu-user.
    """
    request = struct.pack("16sH22x", os.fsencode(interface), 0)  # struct ifreq of netdevice(7)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        (flags,) = struct.unpack_from("H", fcntl.ioctl(asked, _SIOCGIFFLAGS, request), 16)
        return bool(flags & _IFF_RUNNING)
    return False


def choose_interfaces(
    available: Sequence[Interface], wanted: Sequence[str] = (), *, coordinator_on_loopback: bool = False
) -> tuple[Interface, ...]:
    """Which interfaces the data plane listens on: the wanted ones, else every one that leads to other hosts.

    A coordinator on the loopback address means that the whole job is on this host. StartError for a wanted interface
    that cannot be used.
    """
    usable = [i for i in available if i.is_up and i.addresses]
    if wanted:
        by_name = {i.name: i for i in usable}
        for name in wanted:
            if name not in by_name:
                state = "is down or has no address" if any(i.name == name for i in available) else "does not exist"
                raise StartError(
                    coded(
                        WorldCode.NO_INTERFACE,
                        f"HOROVOD_NETWORK_INTERFACES names {name!r}, which {state} on host {socket.gethostname()}; "
                        f"usable are: {', '.join(by_name) or 'none'}.",
                    )
                )
        return tuple(by_name[name] for name in dict.fromkeys(wanted))
    loopback = tuple(i for i in usable if i.is_loopback)
    outside = tuple(i for i in usable if not i.is_loopback and not i.is_bridge)
    chosen = loopback if coordinator_on_loopback and loopback else outside or loopback
    if not chosen:
        raise StartError(
            coded(
                WorldCode.NO_INTERFACE,
                f"Host {socket.gethostname()} has no network interface that is up and has an address, so its ranks "
                "cannot connect over TCP. Bring one up (at least lo), or name one with HOROVOD_NETWORK_INTERFACES.",
            )
        )
    return chosen


def check_loopback(coordinator: str) -> None:
    """Raises StartError when these addresses of coordinators are loopback ones, and nothing can be sent to them."""
    source = "HOROVOD_COORDINATOR"
    hosts = [split_address(one, source)[0] for one in split_addresses(coordinator, source)]
    found = [address for host in hosts for address in addresses_of(host)]
    if not found or not all(ipaddress.ip_address(one).is_loopback and loopback_is_down(one) for one in found):
        return
    sentence = f"No process can reach the coordinator at {coordinator}: {why_loopback_is_down(found[0])}."
    raise StartError(coded(WorldCode.NO_INTERFACE, sentence))


def is_loopback(host: str) -> bool:
    """True when every address of `host` is a loopback address. A name that cannot be resolved is not."""
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(row[4][0]).partition("%")[0]).is_loopback for row in rows)


# Which users' processes listen on an address of this host, from the kernel's tables of TCP sockets.

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
