"""A key that one coordinator of the store holds at a time: its value says which, its revision is the guard of the rest.

Whoever takes the key writes his own record there, in place of the one that he has read. Everything that he decides is
written under the guard which that gives him. So one who was replaced without noticing can decide nothing more, and no
clock has to be right for that.

When a holder may be replaced is for those who hold: the key of a job has no lease (services/serving.py), that of the
cluster has one (services/leading.py).
"""

import contextlib

from horovod.protos.v1 import membership_pb2

from .base import MISSING, Entry, Guard, Store, UncertainError


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
