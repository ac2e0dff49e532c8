"""The token that a member shows to its coordinator: given in the settings, or found on this host.

A coordinator that was started without a token on a loopback address keeps one in a file that only its own user can read
(horovod.coordinator.token, which must agree on names and places; a test compares the two). A member of the same user
finds it by the address.

The other direction counts as well: another user's process may listen on that address, and a member believes what its
coordinator says. So without a token of its own, a member speaks only to sockets of its own user. It looks before each
attempt and once more when it knows its world, in case the address has changed hands in between.
docs/adr/0017-found-tokens.md tells why so.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pwd
import select
import stat
import tempfile
import time
from pathlib import Path

from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.host import is_loopback
from horovod.worker.runtime.port_owner import addresses_of, owners
from horovod.worker.setting import MAX_TOKEN_LENGTH, is_token, split_address
from horovod.worker.settings import Settings

READ_TIMEOUT_SECONDS = 10.0  # for a pipe whose writer is slow

log = logging.getLogger(__name__)


def given_token(settings: Settings) -> str | None:
    """The token of HOROVOD_TOKEN or HOROVOD_TOKEN_FILE. StartError with a sentence when the file can't be used."""
    if settings.token_file is None:
        return settings.token
    token = read_token(settings.token_file)
    if settings.token not in (None, token):
        raise StartError(
            f"HOROVOD_TOKEN and HOROVOD_TOKEN_FILE={settings.token_file!r} hold two different tokens. Leave one of "
            "them out."
        )
    return token


def read_token(path: str) -> str:
    """The secret in the file, without the white space around it. StartError with a sentence."""
    where = f"the token file {path!r} (HOROVOD_TOKEN_FILE)"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise StartError(f"Can't read {where}: it is a directory.")
            content = _read(descriptor, where)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StartError(f"Can't read {where}: {error.strerror}.") from error
    token = content.decode("latin-1").strip()
    if not is_token(token):
        raise StartError(
            f"{where[0].upper()}{where[1:]} must hold one line of ASCII text without spaces, {MAX_TOKEN_LENGTH} "
            f"characters at most, but it {'is empty' if not token else 'does not'}."
        )
    if stat.S_ISREG(status.st_mode) and (others := status.st_mode & 0o077):
        log.warning(
            "Other users may %s the token file %r (mode %04o); `chmod 600` keeps it to its owner.",
            "read" if others & 0o044 else "change",
            path,
            stat.S_IMODE(status.st_mode),
        )
    return token


def _read(descriptor: int, where: str) -> bytes:
    """The content up to a little more than a token may have. The shell's <(command) makes a pipe, which takes time."""
    content = b""
    deadline = time.monotonic() + READ_TIMEOUT_SECONDS
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while len(content) <= 2 * MAX_TOKEN_LENGTH:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise StartError(f"Can't read {where}: it had no end after {READ_TIMEOUT_SECONDS:.0f} s.")
        data = os.read(descriptor, 2 * MAX_TOKEN_LENGTH)
        if not data:
            break
        content += data
    return content


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
                f"It can't be told whose coordinator answers at {self._address}: no process listens there that is seen "
                "from here. Where connections are forwarded, give the coordinator's token in HOROVOD_TOKEN or "
                "HOROVOD_TOKEN_FILE."
            )

    def _check_owner(self) -> bool:
        """Whether anything listens on the address; StartError if it is not this user's."""
        try:
            found = owners(addresses_of(self._host), self._port)
        except OSError as error:
            raise StartError(
                f"It can't be told whose process listens at {self._address} ({error}), and a coordinator of another "
                "user could make this process do as it likes. Give the coordinator's token in HOROVOD_TOKEN or "
                "HOROVOD_TOKEN_FILE."
            ) from error
        if strangers := sorted(found - {os.geteuid()}):
            raise StartError(
                f"What listens at {self._address} belongs to {_user(strangers[0])}, but this process to "
                f"{_user(os.geteuid())}, and a coordinator of another user could make it do as it likes. Choose "
                "another port for your own coordinator, or, to take part in the job of that one, set HOROVOD_TOKEN or "
                "HOROVOD_TOKEN_FILE to the token that it was started with."
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


# -- the files of coordinators, as horovod.coordinator.token names them ------------------------------------------------


def folders() -> list[Path]:
    """Where such files may be, the best place first."""
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    found = [Path(runtime) / "horovod"] if os.path.isabs(runtime) else []
    found += [Path(f"/run/user/{user}/horovod")]
    found += [Path(folder) / f"horovod-{user}" for folder in (tempfile.gettempdir(), "/tmp")]  # noqa: S108
    return list(dict.fromkeys(found))


def file_name(address: str, port: int) -> str:
    """The file of the coordinator that listens on the numeric `address` in this network namespace."""
    return f"{address}-{port}-{network_namespace()}"


def network_namespace() -> int:
    """A number; two namespaces may each have a coordinator on one address, and share the directory."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0


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
        f"The coordinator's token in {str(path)!r} is not usable: expected a plain file that its owner alone can read "
        "and write (mode 0600). Remove it and start the coordinator again."
    )
