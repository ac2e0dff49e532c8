"""Small pieces of the sentences that people read: lists of ranks, members, counts, reasons of failures."""

from __future__ import annotations

import errno
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence

from horovod.base.errors import coded_like, without_code

MAX_TEXT_LENGTH = 1000
MAX_RELEASE_LENGTH = 80


def printable(text: str, limit: int = MAX_TEXT_LENGTH) -> str:
    """`text` from outside as it may stand in a sentence: no longer than `limit`, and nothing in it that a log or a
    terminal would act on. Line breaks, escape sequences and marks that turn the direction of writing become `\\n`,
    `\\x1b`, `\\u202e`. An error that is cut keeps its code.
    """
    shown = text if len(text) <= limit else coded_like(text, f"{without_code(text)[:limit]}...")
    if shown.isprintable():
        return shown
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in shown)


def release_in_words(version: str) -> str:
    """`Horovod 1.0.1`, of what a peer says of its release. Those before 1.0.0 say nothing of it to a coordinator."""
    return f"Horovod {printable(version, MAX_RELEASE_LENGTH)}" if version else "a Horovod before 1.0.0"


def plural(count: int, noun: str) -> str:
    """`1 member`, `2 members`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def joined(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def shortened(items: Sequence[str], limit: int) -> str:
    """Like `joined`, but names at most `limit` of them: a world may have thousands of ranks."""
    if len(items) <= limit:
        return joined(items)
    return f"{', '.join(items[:limit])} and {len(items) - limit} more"


def ranks_in_words(ranks: Iterable[int], noun: str = "rank") -> str:
    """`rank 3`, `ranks 0 and 2`, `ranks 0-3, 7 and 9-11`; `workers 0 and 2`."""
    runs: list[tuple[int, int]] = []
    count = 0
    for rank in sorted(set(ranks)):
        count += 1
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    parts: list[str] = []
    for first, last in runs:
        if last - first < 2:
            parts.extend(str(rank) for rank in range(first, last + 1))
        else:
            parts.append(f"{first}-{last}")
    return f"{noun if count == 1 else f'{noun}s'} {shortened(parts, 16)}"


def values_by_rank(value_of: Mapping[int, str], limit: int = 4) -> str:
    """`rank 0 has float32; ranks 1 and 2 have float64`, in the order of the first rank of each value."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(value_of):
        groups.setdefault(value_of[rank], []).append(rank)
    parts = [
        f"{ranks_in_words(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}" for value, ranks in groups.items()
    ]
    if len(parts) > limit:
        parts = [*parts[:limit], f"other ranks have {plural(len(groups) - limit, 'other value')}"]
    return "; ".join(parts)


def process_in_words(rank: int | None, pid: int, host: str) -> str:
    """`rank 1 (pid 4242) on host node-b`; without a rank `the process with pid 4242 on host node-b`."""
    return f"the process with pid {pid} on host {host}" if rank is None else f"rank {rank} (pid {pid}) on host {host}"


def capitalized(sentence: str) -> str:
    """First letter upper case, the rest untouched (host and tensor names keep their case)."""
    return sentence[:1].upper() + sentence[1:]


def uncapitalized(sentence: str) -> str:
    """First letter lower case, the rest untouched: a sentence that becomes the end of another one."""
    return sentence[:1].lower() + sentence[1:]


def printable_lines(text: str, limit: int = MAX_TEXT_LENGTH) -> str:
    """The same for a text that may have several lines, such as a report."""
    return "\n".join(printable(line, limit) for line in text.split("\n"))


def for_people(text: str) -> str:
    """Text of several lines as it goes to a terminal or a log, at the very end: names and sentences of other processes
    stand in it, of whatever version and by whoever wrote them, and a terminal obeys escape sequences (OSC 52 writes its
    clipboard). All of it, with each of these characters in the form that `printable` gives it.
    """
    return printable_lines(text, sys.maxsize)


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
