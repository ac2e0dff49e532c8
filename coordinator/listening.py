"""How a coordinator takes its port, and lets the processes of its user find the token that it asks for there."""

from __future__ import annotations

import asyncio
import errno
import logging

import grpc

from .address import ListenAddress, is_free
from .token import TokenFiles

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
