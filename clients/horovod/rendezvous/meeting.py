"""How processes of one user on one host find the coordinator that rank 0 has opened: through a file.

A port that others could compute would not do. Any user of the host may listen on it first, be taken for the coordinator
and be given the token, and with it the power to make ranks run code of theirs (objects are pickled). A file in a folder
that only this user can open proves who wrote it, so port and token can be random.

The folder is that of horovod.coordinator.token, where coordinators of this user keep their tokens. The file is locked
by its writer as long as that lives (a POSIX record lock: the kernel lifts it at the end of the process, and a forked
child does not hold it), so one that a killed process left behind is not believed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from horovod.base.errors import AccessCode, code_of, coded
from horovod.worker.runtime.errors import StartError


@dataclass(frozen=True)
class Meeting:
    """Where the coordinator is, the token that it asks for, and the process that opened it."""

    address: str
    token: str
    pid: int


class Published:
    """A file that others read until `close`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def close(self) -> None:
        """Takes the file away. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                if os.stat(self._path).st_ino == os.fstat(descriptor).st_ino:
                    self._path.unlink()
            os.close(descriptor)


def folder() -> Path:
    """The folder that is this user's alone; made when it is missing. StartError when there can't be one."""
    from horovod.coordinator.token import made_folder

    try:
        return made_folder()
    except OSError as error:
        raise StartError(
            coded(
                code_of(error.strerror or "") or AccessCode.NOT_PRIVATE,
                f"The processes of this job can't tell each other where their coordinator is. {error.strerror}",
            )
        ) from error


def publish(path: Path, meeting: Meeting) -> Published:
    """Makes the file, complete from the first moment. FileExistsError where a living process has made it already."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, json.dumps(asdict(meeting)).encode())
        while True:
            try:
                os.link(unfinished, path)
                break
            except FileExistsError:
                if read(path) is not None:
                    raise
                path.unlink(missing_ok=True)  # a process that was killed has left it behind
    except OSError:
        os.close(descriptor)
        raise
    finally:
        unfinished.unlink(missing_ok=True)
    return Published(path, descriptor)


def read(path: Path) -> Meeting | None:
    """What the file says; None while there is none that was written by this user's process and whose writer lives."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077 or not stat.S_ISREG(status.st_mode):
            return None
        with contextlib.suppress(BlockingIOError, PermissionError):  # either says that another process has it
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        return Meeting(**json.loads(os.read(descriptor, 4096)))
    except (OSError, ValueError, TypeError):
        return None
    finally:
        os.close(descriptor)
