"""Where to listen: reading HOST:PORT, and sentences for what can go wrong with it."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import random
import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from horovod.base.addresses import loopback_is_down, why_loopback_is_down, with_port, wrong_host_name
from horovod.base.errors import ClusterCode, SettingCode, coded

from .token import TokenFiles


def everywhere(ports: Sequence[int] | None = None) -> str:
    """To listen on every interface of this host, at one of these ports that is free, or one that the system chooses."""
    host = every_host()
    return with_port(host, free_port(host, ports) if ports else 0)


def every_host() -> str:
    """The address that stands for all of this host's, those of IPv6 included if there are any."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - strangers are kept out by a token


def free_port(host: str, ports: Sequence[int]) -> int:
    """One of these ports on which nobody listens; OSError with a sentence where there is none."""
    start = random.randrange(len(ports))
    if port := next((one for one in (*ports[start:], *ports[:start]) if is_free(host, one)), 0):
        return port
    sentence = f"Can't listen on {host}: the ports {ports[0]} to {ports[-1]} (HOROVOD_PORTS) are in use. Name more."
    raise OSError(errno.EADDRINUSE, coded(ClusterCode.PORT_IN_USE, sentence))


@dataclass(frozen=True)
class ListenAddress:
    host: str  # without brackets
    port: int  # 0 lets the system choose

    def __str__(self) -> str:
        return with_port(self.host, self.port)

    @classmethod
    def parse(cls, text: str) -> ListenAddress:
        """Raises ValueError with a sentence."""
        sentence = (
            f"Can't listen on {text!r}: expected HOST:PORT with a port from 0 to 65535, for example 127.0.0.1:29400 or "
            "[::1]:29400."
        )
        wrong = ValueError(coded(SettingCode.INVALID_SETTING, sentence))
        host, colon, port_text = text.rpartition(":")
        if not colon or not port_text.isascii() or not port_text.isdigit() or int(port_text) > 65535:
            raise wrong
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise wrong
        if not host or any(character.isspace() or character in "[]/" for character in host):
            raise wrong
        if why := wrong_host_name(host):
            raise ValueError(coded(SettingCode.INVALID_SETTING, f"Can't listen on {text!r}: {why}."))
        return cls(host, int(port_text))

    def is_loopback(self) -> bool:
        """True when only processes of this host can connect. Raises OSError when the host name is unknown."""
        return all(ipaddress.ip_address(address).is_loopback for address in self.resolved())

    def is_wildcard(self) -> bool:
        """True when it stands for all addresses of this host. Raises OSError when the host name is unknown."""
        return any(ipaddress.ip_address(address).is_unspecified for address in self.resolved())

    def check_free(self) -> None:
        """Raises OSError with a sentence when this address can't be listened on.

        gRPC itself only says that it failed, and prints to stderr; binding a plain socket first tells why.
        """
        self.check_loopback()
        for address in self.resolved():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((address, self.port))
                    probe.listen(1)
            except OSError as error:
                raise self.bind_error(error.errno or errno.EADDRNOTAVAIL) from error

    def check_loopback(self) -> None:
        """Raises OSError with a sentence when this is a loopback address that no process can connect to."""
        down = [one for one in self.resolved() if ipaddress.ip_address(one).is_loopback and loopback_is_down(one)]
        if down:
            sentence = f"Can't listen on {self}: {why_loopback_is_down(down[0])}."
            raise OSError(errno.ENETUNREACH, coded(ClusterCode.CANNOT_LISTEN, sentence))

    def bind_error(self, number: int) -> OSError:
        why = {
            errno.EADDRINUSE: "the port is in use. Stop the program that listens there, or choose another port",
            errno.EADDRNOTAVAIL: "no network interface of this host has that address; `ip address` lists them",
            errno.EACCES: "that port needs more permissions. Choose a port above 1023",
        }.get(number, reason_of(number))
        code = ClusterCode.PORT_IN_USE if number == errno.EADDRINUSE else ClusterCode.CANNOT_LISTEN
        return OSError(number, coded(code, f"Can't listen on {self}: {why}."))

    def resolved(self) -> list[str]:
        """The numeric addresses. Raises OSError when the host name is unknown."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            sentence = f"Can't listen on {self}: unknown host {self.host!r} ({reason})."
            raise OSError(errno.EADDRNOTAVAIL, coded(ClusterCode.CANNOT_LISTEN, sentence)) from error
        return sorted({str(entry[4][0]).partition("%")[0] for entry in found})


def reason_of(number: int) -> str:
    """Why a system call failed; for want of descriptors with the limit and how to raise it."""
    if number == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"this process has too many open files; its limit is {limit} (ulimit -n, in a systemd unit LimitNOFILE)"
    if number == errno.ENFILE:
        return "all processes of this host together have too many open files (sysctl fs.file-max)"
    return os.strerror(number)


def is_free(address: str, port: int) -> bool:
    """Whether no process listens on the numeric address.

    This binds a socket and does not listen on it, so no client connects to it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


# How a coordinator takes its port, and lets the processes of its user find the token that it asks for there.

_log = logging.getLogger(__name__)


def bind(server: grpc.aio.Server, address: ListenAddress, credentials: grpc.ServerCredentials | None) -> int:
    """The port. From now on connections are accepted; they are served when the server starts."""
    if address.port:
        address.check_free()
    address.check_loopback()
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError as error:
        address.check_free()  # knows more
        raise address.bind_error(errno.EADDRINUSE) from error
    if port == 0:
        raise address.bind_error(errno.EADDRINUSE)
    return port


async def bind_and_tell(
    server: grpc.aio.Server, address: ListenAddress, credentials: grpc.ServerCredentials | None, files: TokenFiles
) -> int:
    """As `bind`. A member that can connect to a port which it was told can also find the token."""
    async with files.locked():
        files.remove_stale(is_free)
        addresses = address.resolved()
        if address.port:
            address.check_free()
            files.write(addresses, address.port)
        try:
            port = bind(server, address, credentials)
            if not address.port:
                files.write(addresses, port)
        except BaseException:
            files.remove()
            raise
    return port


async def keep(files: TokenFiles, period_s: float) -> None:
    """Sees to it that members that come later find the token, for ever."""
    told = ""
    while True:
        await asyncio.sleep(period_s)
        try:
            files.keep()
            told = ""
        except OSError as error:
            if told != (error.strerror or str(error)):
                told = error.strerror or str(error)
                _log.warning("%s", told)
