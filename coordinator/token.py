"""The token that members must know: read from a file of the user's, or made here and kept where only the user reads it.

A coordinator that listens on the loopback interface without a token file makes a random token and keeps it in a file
of mode 0600, named after the address on which it listens, in a directory of mode 0700. Processes of the same user find
it there by themselves (horovod.worker.runtime.token, by the names and places of horovod.base.tokens);
other users of the host can neither read it nor put a file there. docs/adr/0017-found-tokens.md tells why so.

Who listens on an address owns its file: the kernel gives an address to one process of a network namespace at a time,
so a file that another coordinator left there is stale. The lock on the directory covers the moments in which that is
not so yet: from the look whether the address is free until it is bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from horovod.base.errors import AccessCode, coded
from horovod.base.tokens import file_name, folders, is_own_folder, network_namespace

LOCK_TIMEOUT_S = 10.0
_LOCK_POLL_S = 0.01


def random_token() -> str:
    return secrets.token_urlsafe(32)


class TokenFiles:
    """The files of one coordinator, one for each loopback address that it listens on.

    Used by the thread of its event loop only.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._names: list[str] = []
        self._folder: Path | None = None

    @contextlib.asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Keeps other coordinators of this user from looking for a free address. Raises OSError with a sentence."""
        self._folder = self._folder or made_folder()
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while not _try_to_lock(folder):
                if time.monotonic() > deadline:
                    sentence = (
                        f"Can't keep the coordinator's token in {str(self._folder)!r}: another coordinator of this "
                        f"user has been starting for {LOCK_TIMEOUT_S:.0f} s; stop it, or give this one a --token-file."
                    )
                    raise OSError(errno.EAGAIN, coded(AccessCode.TOKEN_NOT_KEPT, sentence))
                await asyncio.sleep(_LOCK_POLL_S)
            yield
        finally:
            # A process that is forked meanwhile has the descriptor, too; this frees the lock for both.
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_UN)
            os.close(folder)

    def write(self, addresses: Sequence[str], port: int) -> None:
        """Makes the files, in place of older ones: this process listens there, or is about to (see `locked`)."""
        self._folder = self._folder or made_folder()
        self._names = [file_name(address, port) for address in addresses]
        for name in self._names:
            self._write(name)

    def keep(self) -> None:
        """Writes again what is gone: folders for temporary files are cleaned of old ones, or end with a login session.

        Raises OSError with a sentence.
        """
        for name in self._names:
            try:
                os.utime((self._folder or made_folder()) / name, follow_symlinks=False)
            except OSError:
                self._folder = made_folder()
                self._write(name)

    def remove(self) -> None:
        """To be called while the address is still taken: then what is there is this coordinator's own."""
        names, self._names = self._names, []
        for name in names:
            if self._folder is not None:
                with contextlib.suppress(OSError):
                    os.unlink(self._folder / name)

    def remove_stale(self, is_free: Callable[[str, int], bool]) -> None:
        """Removes the files of coordinators that were killed: nothing listens on their addresses. Under `locked`."""
        assert self._folder is not None
        for name in os.listdir(self._folder):
            address, _, rest = name.lstrip(".").partition("-")
            port, _, namespace = rest.partition("-")
            if namespace == str(network_namespace()) and port.isdigit() and is_free(address, int(port)):
                with contextlib.suppress(OSError):
                    os.unlink(self._folder / name)

    def _write(self, name: str) -> None:
        """Complete or not at all: a member may look at any time."""
        assert self._folder is not None
        unfinished = self._folder / f".{name}"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(unfinished, flags, 0o600), "w", encoding="ascii") as file:
                file.write(f"{self._token}\n")
            os.rename(unfinished, self._folder / name)
        except OSError as error:
            raise _cannot_keep(self._folder, error) from error


def _try_to_lock(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def made_folder() -> Path:
    """The first place where a folder of this user's can be, with that folder in it, for its eyes only."""
    problem: OSError | None = None
    for folder in folders():
        try:
            if folder.name == "horovod" and not is_own_folder(folder.parent):
                continue  # for example XDG_RUNTIME_DIR of another user, which `su` leaves set
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            status = os.lstat(folder)
        except OSError as error:
            problem = _cannot_keep(folder, error)
            continue
        if not is_own_folder(folder):
            whose = f"it belongs to uid {status.st_uid}" if stat.S_ISDIR(status.st_mode) else "it is not a directory"
            raise _cannot_keep(folder, OSError(errno.EPERM, f"{whose}, so it may have been put there by another user"))
        if status.st_mode & 0o077:
            os.chmod(folder, 0o700)
        return folder
    assert problem is not None
    raise problem


def _cannot_keep(folder: Path, error: OSError) -> OSError:
    sentence = (
        f"Can't keep the coordinator's token in {str(folder)!r}, where processes of this user look for it: "
        f"{error.strerror}. Set XDG_RUNTIME_DIR to your own directory, or give the coordinator a token yourself "
        "(--token-file FILE, and HOROVOD_TOKEN_FILE for the processes)."
    )
    return OSError(error.errno, coded(AccessCode.TOKEN_NOT_KEPT, sentence))
