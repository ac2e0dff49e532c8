"""A key that one coordinator of the store holds at a time: its value says which, its revision is the guard of the rest.

Whoever takes the key writes his own record there, in place of the one that he has read. Everything that he decides is
written under the guard which that gives him. So one who was replaced without noticing can decide nothing more, and no
clock has to be right for that.

When a holder may be replaced is for those who hold: the key of a job has no lease (services/serving.py), that of the
cluster has one (services/leading.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from horovod.protos.v1 import membership_pb2

from .base import MISSING, Entry, FencedError, Guard, Store, StoreError, TooLargeError, UncertainError


async def take(
    store: Store, key: str, holder: membership_pb2.Serving, found: Entry | None, lease: int | None = None
) -> Guard | None:
    """Makes `holder` the one that holds the key, in place of `found`.

    None when another coordinator was faster, or when the answer to the write was lost. The key is then to be read
    again: a record that turns out to be one's own is replaced like one of somebody who is dead.
    """
    value = holder.SerializeToString(deterministic=True)
    with contextlib.suppress(UncertainError):
        entry = await store.put_if(key, value, found.revision if found else MISSING, lease)
        return Guard(key, entry.revision) if entry else None
    return None


async def holds(store: Store, guard: Guard) -> bool:
    """Whether nobody has written or deleted the key since it was taken."""
    current = await store.get(guard.key)
    return current is not None and current.revision == guard.revision


async def release(store: Store, guard: Guard) -> None:
    """Gives the key up; nothing happens when another coordinator holds it by now."""
    await store.delete(guard.key, guard.revision)


# A write that is made again until the store has it, for members and for agents.
#
# Who decides for a job or for the cluster writes under a guard. So a write that is not in the store yet is either made
# again or void: it is void once this coordinator does not decide any more, as it knows by itself or as the store says.

STORE_RETRY_S = 0.5  # seconds between attempts while the store may answer by itself again

Written = TypeVar("Written")


async def until_stored(
    write: Callable[[Guard], Awaitable[Written]],
    guard: Callable[[], Guard | None],
    fenced: Callable[[Guard], None],
    failed: Callable[[StoreError, bool], Awaitable[None]],
) -> Written | None:
    """What `write` returned in the end; None if the write is void.

    guard: asked before each attempt; None: this coordinator decides no more. fenced: the store says so of this guard.
    failed: called when an attempt was in vain, and whether its sentence is new; the next one begins when it returns.

    Raises TooLargeError, which another attempt would not change, and what `failed` raises.
    """
    told: set[str] = set()
    while (held := guard()) is not None:
        try:
            return await write(held)
        except FencedError:
            fenced(held)
            return None
        except TooLargeError:
            raise
        except StoreError as error:
            is_news = str(error) not in told
            told.add(str(error))
            await failed(error, is_news)
    return None
