"""The token that a member shows to its coordinator: given in the settings, or found on this host.

A coordinator that was started without a token on a loopback address keeps one in a file that only its own user can read
(horovod.coordinator.token). A member of the same user finds it by the address.

The other direction counts as well: another user's process may listen on that address, and a member believes what its
coordinator says. So on a loopback address a member speaks only to sockets of its own user, unless the coordinator shows
a certificate that the member knows. It looks before each attempt and once more when it knows its world, in case the
address has changed hands in between. A token that was given is shown to root's coordinator as well, and to one on
another host to which the kernel passes connections on.
docs/adr/0017-found-tokens.md tells why so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import socket
import stat
from pathlib import Path

from horovod.base.errors import AccessCode, SettingCode, coded
from horovod.base.setting import split_address
from horovod.base.settings import Settings
from horovod.base.tokens import MAX_TOKEN_LENGTH, file_name, folders, is_token, read_token
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.host import addresses_of, is_loopback, owners

_CONNECT_S = 2.0
_GIVE_BOTH = (
    "Give its token (HOROVOD_TOKEN or HOROVOD_TOKEN_FILE) and the authority of its certificate (HOROVOD_TLS_CA; "
    "`horovodrun certs` makes one)"
)


def given_token(settings: Settings) -> str | None:
    """The token of HOROVOD_TOKEN or HOROVOD_TOKEN_FILE. StartError with a sentence when the file can't be used."""
    if settings.token_file is None:
        return settings.token
    try:
        token = read_token(settings.token_file, "HOROVOD_TOKEN_FILE")
    except OSError as error:
        raise StartError(error.strerror or str(error)) from error
    if settings.token not in (None, token):
        raise StartError(
            coded(
                SettingCode.CONFLICTING_SETTINGS,
                f"HOROVOD_TOKEN and HOROVOD_TOKEN_FILE={settings.token_file!r} hold two different tokens. Leave one of "
                "them out.",
            )
        )
    return token


class Credential:
    """What one session shows to its coordinator."""

    def __init__(self, address: str, token: str | None, has_tls: bool = False) -> None:
        """token: the one that was given; without it, one is looked for when the address is a loopback one. has_tls: a
        coordinator with a token is known by its certificate, so it does not matter whose process it is.
        """
        self._address = address
        self._token = token
        self._host, self._port = split_address(address, "coordinator")
        self._is_given = token is not None
        self._checks = not (self._is_given and has_tls) and is_loopback(self._host)
        self._withheld = False  # whether an attempt that began when nobody listened withholds the token that was given
        # Whether connections lead through a port that the kernel passes on to another host or network namespace.
        self._passed_on = False

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For one attempt to join. StartError when another user's process listens on the address."""
        if self._checks:
            listens = self._check_owner()
            if not self._is_given:
                self._token = self._found() if listens else self._token
            else:
                self._passed_on = not listens and self._is_passed_on()
                self._withheld = not listens and not self._passed_on
        if not self._token or self._withheld:
            return ()
        return (("authorization", f"Bearer {self._token}"),)

    def is_outdated(self) -> bool:
        """Whether another attempt would show another token: a coordinator took the address since this one began."""
        if not self._checks or self._is_given:
            return self._withheld
        return (found := self._found()) is not None and found != self._token

    def confirm(self) -> None:
        """The world stands. StartError unless the coordinator is still the one that the attempt was meant for."""
        if self._checks and not self._check_owner() and not self._passed_on:
            remedy = (
                "Start again. If other users could take that port, give the coordinator a certificate (HOROVOD_TLS_CA)."
                if self._is_given
                else "If the connection is forwarded, give the coordinator's token in HOROVOD_TOKEN or "
                "HOROVOD_TOKEN_FILE."
            )
            raise StartError(
                coded(
                    AccessCode.UNKNOWN_OWNER,
                    f"It can't be told whose coordinator answers at {self._address}: no process listens there that is "
                    f"seen from here. {remedy}",
                )
            )

    def _check_owner(self) -> bool:
        """Whether anything listens on the address; StartError if it is not this user's."""
        try:
            found = owners(addresses_of(self._host), self._port)
        except OSError as error:
            remedy = "Let it show a certificate (HOROVOD_TLS_CA)" if self._is_given else _GIVE_BOTH
            raise StartError(
                coded(
                    AccessCode.UNKNOWN_OWNER,
                    f"It can't be told whose process listens at {self._address} ({error}), and a coordinator of "
                    f"another user could make this process do as it likes. {remedy}.",
                )
            ) from error
        believed = {os.geteuid(), 0} if self._is_given else {os.geteuid()}
        if strangers := sorted(found - believed):
            unsent = " It was not sent the token of this process." if self._is_given else ""
            raise StartError(
                coded(
                    AccessCode.OTHER_USER,
                    f"The process that listens at {self._address} belongs to {_user(strangers[0])}, but this "
                    f"process belongs to {_user(os.geteuid())}, and another user's coordinator could make it "
                    f"run any code.{unsent} Choose another port for your own coordinator. To take part in the "
                    f"job of that one, {_GIVE_BOTH[0].lower()}{_GIVE_BOTH[1:]}.",
                )
            )
        return bool(found)

    def _is_passed_on(self) -> bool:
        """Whether connections are accepted although nobody listens here: the kernel passes them on, as root told it.

        Nobody can then take the address by listening on it. StartError when somebody of another user does by now.
        """
        for address in addresses_of(self._host):
            with contextlib.suppress(OSError):
                socket.create_connection((address, self._port), timeout=_CONNECT_S).close()
                self._check_owner()
                return True
        return False

    def _found(self) -> str | None:
        names = [file_name(address, self._port) for address in addresses_of(self._host)]
        for path in (folder / name for folder in folders() for name in names):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                if token := _private_token(path):
                    return token
        return None


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name} (uid {number})"
    except KeyError:
        return f"uid {number}"


def _private_token(path: Path) -> str | None:
    """The token in a file that only this user can have made; None where the folder is another user's.

    StartError when the folder is this user's and the file is not for its eyes only: then no coordinator made it.
    """
    folder = os.lstat(path.parent)
    if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.geteuid():
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:  # a symbolic link
            raise
        raise _not_private(path) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise _not_private(path)
        token = os.read(descriptor, 2 * MAX_TOKEN_LENGTH).decode("latin-1").strip()
    finally:
        os.close(descriptor)
    return token if is_token(token) else None


def _not_private(path: Path) -> StartError:
    return StartError(
        coded(
            AccessCode.NOT_PRIVATE,
            f"The coordinator's token in {str(path)!r} is not usable: expected a plain file that its owner alone can "
            "read and write (mode 0600). Remove it and start the coordinator again.",
        )
    )
