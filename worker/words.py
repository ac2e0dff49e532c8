"""Small pieces of the sentences that people read."""

from __future__ import annotations

import errno
import resource

MAX_TEXT_LENGTH = 1000


def printable(text: str, limit: int = MAX_TEXT_LENGTH) -> str:
    """`text` from outside as it may stand in a sentence: no longer than `limit`, and nothing in it that a log or a
    terminal would act on. Line breaks, escape sequences and marks that turn the direction of writing become `\\n`,
    `\\x1b`, `\\u202e`.
    """
    shown = text if len(text) <= limit else f"{text[:limit]}..."
    if shown.isprintable():
        return shown
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in shown)


def printable_lines(text: str, limit: int = MAX_TEXT_LENGTH) -> str:
    """The same for a text that may have several lines, such as a report."""
    return "\n".join(printable(line, limit) for line in text.split("\n"))


def reason_of(error: OSError) -> str:
    """Why a system call failed; for want of descriptors with the limit and how to raise it."""
    if error.errno == errno.EMFILE:
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"this process has too many open files; its limit is {limit}, which `ulimit -n` can raise up to {most}"
    if error.errno == errno.ENFILE:
        return "all processes of this host together have too many open files (sysctl fs.file-max)"
    return error.strerror or str(error)


def is_out_of_descriptors(error: OSError) -> bool:
    """Whether another address or another attempt would fail in the same way."""
    return error.errno in (errno.EMFILE, errno.ENFILE)
