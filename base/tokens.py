"""The token that members must know: the file that holds one, and where a coordinator keeps the one that it made.

A coordinator that listens on the loopback interface without a token file makes a random token and keeps it in a file
that only its own user can read (horovod.coordinator.token); processes of that user find it by the coordinator's address
(horovod.worker.runtime.token). docs/adr/0017-found-tokens.md tells why so.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import select
import stat
import tempfile
import time
from pathlib import Path

from horovod.base.errors import AccessCode, code_of, coded

MAX_TOKEN_LENGTH = 4096  # gRPC refuses headers above 8 KiB
READ_TIMEOUT_S = 10.0  # seconds for a pipe whose writer is slow

_log = logging.getLogger(__name__)


def is_token(text: str) -> bool:
    """Whether an HTTP header can carry `text`: one line of ASCII text without spaces."""
    return 0 < len(text) <= MAX_TOKEN_LENGTH and all("!" <= character <= "~" for character in text)


def read_token(path: str, setting: str = "") -> str:
    """The secret in the file, without the white space around it. Raises OSError with a sentence.

    setting: the name of the setting that names the file, for the sentence.
    """
    where = f"the token file {path!r}{setting and f' ({setting})'}"
    token = _content(path, where).strip()
    if not is_token(token):
        raise _unusable(
            errno.EINVAL,
            f"{where[0].upper()}{where[1:]} must hold one line of ASCII text without spaces, {MAX_TOKEN_LENGTH} "
            f"characters at most, but it {'is empty' if not token else 'does not'}.",
        )
    return token


def read_secrets(path: str, setting: str) -> list[str]:
    """The secrets in the file, one a line, as `read_token` reads one."""
    where = f"the file {path!r} ({setting})"
    secrets = _content(path, where).split("\n")
    found = [secret.strip() for secret in secrets if secret.strip()]
    if not found or not all(is_token(one) for one in found):
        raise _unusable(
            errno.EINVAL,
            f"{where[0].upper()}{where[1:]} must hold secrets, each a line of ASCII text without spaces, but it "
            f"{'does not' if found else 'is empty'}.",
        )
    return found


def _content(path: str, where: str) -> str:
    """Of a file of secrets. Warns when others may read it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise _unusable(errno.EISDIR, f"Can't read {where}: it is a directory.")
            content = _read(descriptor, where)
        finally:
            os.close(descriptor)
    except OSError as error:
        if code_of(error.strerror or "") is AccessCode.UNUSABLE_TOKEN:
            raise
        raise _unusable(error.errno, f"Can't read {where}: {error.strerror}.") from error
    if stat.S_ISREG(status.st_mode) and (others := status.st_mode & 0o077):
        _log.warning(
            "Other users may %s %s (mode %04o); `chmod 600` keeps it to its owner.",
            "read" if others & 0o044 else "change",
            where,
            stat.S_IMODE(status.st_mode),
        )
    return content.decode("latin-1")


def _read(descriptor: int, where: str) -> bytes:
    """The content up to a little more than a token may have. The shell's <(command) makes a pipe, which takes time."""
    content = b""
    deadline = time.monotonic() + READ_TIMEOUT_S
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while len(content) <= 2 * MAX_TOKEN_LENGTH:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise _unusable(errno.ETIMEDOUT, f"Can't read {where}: it had no end after {READ_TIMEOUT_S:.0f} s.")
        data = os.read(descriptor, 2 * MAX_TOKEN_LENGTH)
        if not data:
            break
        content += data
    return content


def _unusable(number: int | None, sentence: str) -> OSError:
    """Of the class that Python has for this number: IsADirectoryError, TimeoutError."""
    return OSError(number, coded(AccessCode.UNUSABLE_TOKEN, sentence))


# -- the files that processes of this user find ------------------------------------------------------------------------


def folders() -> list[Path]:
    """Where such files may be, the best place first."""
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    found = [Path(runtime) / "horovod"] if os.path.isabs(runtime) else []
    found += [Path(f"/run/user/{user}/horovod")]
    found += [Path(folder) / f"horovod-{user}" for folder in (tempfile.gettempdir(), "/tmp")]  # noqa: S108
    return list(dict.fromkeys(found))


def make_private(folder: Path) -> None:
    """Makes `folder` and those above it that are missing, for this user's eyes only. OSError with a sentence if another
    user may have made one of them, who could replace what is in it, such as a socket whose words are obeyed.

    Of the folders above, those count that lie where every user can make one, as in /tmp. Nobody can replace them once
    they are this user's: such a place has the sticky bit.
    """
    absolute = Path(os.path.abspath(folder))
    chain = [*reversed(absolute.parents), absolute]
    for place, one in itertools.pairwise(chain):
        is_public = bool(os.stat(place).st_mode & 0o002)
        with contextlib.suppress(FileExistsError):
            os.mkdir(one, 0o700)
        if not is_public and one != absolute:
            continue
        status = os.lstat(one)
        if status.st_uid != os.geteuid() and (one == absolute or status.st_uid != 0):
            raise _of_others(one, f"it belongs to uid {status.st_uid}")
        if one == absolute and not stat.S_ISDIR(status.st_mode):
            if not stat.S_ISLNK(status.st_mode):
                raise _of_others(one, "it is no directory")
            make_private(Path(os.path.realpath(one)))  # a link that this user has made
        elif one == absolute and status.st_mode & 0o077:
            os.chmod(one, 0o700)


def is_own_folder(path: Path) -> bool:
    """Whether `path` is a folder, and no link to one, that belongs to this user. OSError if there is none."""
    status = os.lstat(path)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _of_others(path: Path, why: str) -> OSError:
    sentence = (
        f"Can't keep private files in {str(path)!r}: {why}, so another user may have made it and could change "
        "its contents. Remove it, or choose another folder (for an agent with --state-dir or HOME)."
    )
    return OSError(errno.EPERM, coded(AccessCode.NOT_PRIVATE, sentence))


def file_name(address: str, port: int) -> str:
    """The file of the coordinator that listens on the numeric `address` in this network namespace."""
    return f"{address}-{port}-{network_namespace()}"


def network_namespace() -> int:
    """A number; two namespaces may each have a coordinator on one address, and share the directory."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0
