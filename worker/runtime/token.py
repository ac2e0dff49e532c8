"""The token that a member shows to its coordinator: given in the settings, or found on this host.

A coordinator that was started without a token on a loopback address keeps one in a file that only its own user can read
(horovod.coordinator.token). A member of the same user finds it by the address.

The other direction counts as well: another user's process may listen on that address, and a member believes what its
coordinator says. So without a token of its own, a member speaks only to sockets of its own user. It looks before each
attempt and once more when it knows its world, in case the address has changed hands in between.
docs/adr/0017-found-tokens.md tells why so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from pathlib import Path

from horovod.base.errors import AccessCode, SettingCode, coded
from horovod.base.setting import split_address
from horovod.base.settings import Settings
from horovod.base.tokens import MAX_TOKEN_LENGTH, file_name, folders, is_token, read_token
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.host import is_loopback
from horovod.worker.runtime.port_owner import addresses_of, owners


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

    def __init__(self, address: str, token: str | None) -> None:
        """token: the one that was given; without it, one is looked for when the address is a loopback one."""
        self._address = address
        self._token = token
        self._host, self._port = split_address(address, "coordinator")
        self._looks = token is None and is_loopback(self._host)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For one attempt to join. StartError when another user's process listens on the address."""
        if self._looks and self._check_owner():
            self._token = self._found()
        return (("authorization", f"Bearer {self._token}"),) if self._token else ()

    def is_outdated(self) -> bool:
        """Whether another token can be found now: another coordinator has taken the address since the attempt began."""
        return self._looks and (found := self._found()) is not None and found != self._token

    def confirm(self) -> None:
        """The world stands. StartError unless the coordinator is still the one that the attempt was meant for."""
        if self._looks and not self._check_owner():
            raise StartError(
                coded(
                    AccessCode.UNKNOWN_OWNER,
                    f"It can't be told whose coordinator answers at {self._address}: no process listens there that is "
                    "seen from here. Where connections are forwarded, give the coordinator's token in HOROVOD_TOKEN or "
                    "HOROVOD_TOKEN_FILE.",
                )
            )

    def _check_owner(self) -> bool:
        """Whether anything listens on the address; StartError if it is not this user's."""
        try:
            found = owners(addresses_of(self._host), self._port)
        except OSError as error:
            raise StartError(
                coded(
                    AccessCode.UNKNOWN_OWNER,
                    f"It can't be told whose process listens at {self._address} ({error}), and a coordinator of "
                    "another user could make this process do as it likes. Give the coordinator's token in "
                    "HOROVOD_TOKEN or HOROVOD_TOKEN_FILE.",
                )
            ) from error
        if strangers := sorted(found - {os.geteuid()}):
            raise StartError(
                coded(
                    AccessCode.OTHER_USER,
                    f"What listens at {self._address} belongs to {_user(strangers[0])}, but this process to "
                    f"{_user(os.geteuid())}, and a coordinator of another user could make it do as it likes. Choose "
                    "another port for your own coordinator, or, to take part in the job of that one, set HOROVOD_TOKEN "
                    "or HOROVOD_TOKEN_FILE to the token that it was started with.",
                )
            )
        return bool(found)

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
