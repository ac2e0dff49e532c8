"""Threads that read, and can be given up on: a service that is silent ends in an error, and no wait is without end.

Packages of fsspec have deadlines of their own, some of half an hour and some of none, and Arrow has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from horovod.base.errors import DataCode, coded
from horovod.data.prefetch import Prefetch
from horovod.data.services import answer_limit_seconds, reason_in_words

# Arrow reads over a network by calling Python from native code. Such a call should end before the interpreter does.
_EXIT_SECONDS: Final = 60.0

# How many items a thread may have ready, beside the one that it makes.
_AHEAD: Final = 1


@contextmanager
def threads(
    makers: Sequence[Callable[[], Iterable[Any]]],
    awaited: Callable[[int], str],
    size_bytes: Callable[[int], int] = lambda _: 0,
) -> Iterator[Iterator[Any]]:
    """The items that these make, each in a thread of its own: one of the first, one of the second, and so on. When the
    block ends, so do the threads.

    awaited, size_bytes: what the maker of this number reads now, and how many bytes that has at most.

    Raises:
        OSError: an item took longer than it may. Other errors of a maker are raised as they are.
    """

    def thread(number: int) -> Prefetch:
        def limit() -> float:
            return answer_limit_seconds(size_bytes(number))

        return Prefetch(makers[number], _AHEAD, _EXIT_SECONDS, awaited=lambda: awaited(number), limit=limit)

    running = [thread(number) for number in range(len(makers))]
    try:
        yield _in_turn(running, awaited)
    finally:
        for one in running:
            one.stop()  # all of them, before one is waited for
        # Where one is late, the others wait for the same service, and nothing is gained by waiting for them.
        for one in running if not any(one.is_late for one in running) else ():
            one.close()


def _in_turn(running: Sequence[Prefetch], awaited: Callable[[int], str]) -> Iterator[Any]:
    """Ends with the thread that ends first: it is the one whose turn comes after the last item."""
    for one in running:
        iter(one)
    for number, one in itertools.cycle(enumerate(running)):
        try:
            item = next(one)
        except StopIteration:
            return
        except TimeoutError as error:
            if not one.is_late:
                raise
            why = f"{error}: see whether its service can be reached from this host, or write smaller row groups"
            raise unreadable(awaited(number), why) from error
        yield item


def unreadable(what: str, why: object) -> OSError:
    """`why` may be an exception of any kind: each file system raises those of its own library."""
    if isinstance(why, FileNotFoundError):
        why = "it is not there"
    reason = reason_in_words(why) or type(why).__name__
    return OSError(coded(DataCode.UNREADABLE_DATA, f"{what} can't be read: {reason}."))
