"""The keys of a job: its epoch counter, which never goes back, who serves it, its current world, who of that is gone.

The coordinator that serves the job decides for it, as long as the entry that says so is the one that it wrote: every
decision is written under that guard (`Guard`), so one that was replaced can decide nothing more. FencedError tells it.
"""

import contextlib
from urllib.parse import quote

from horovod.protos.v1 import membership_pb2

from .base import MISSING, Entry, Guard, Store, UncertainError

JOBS = "jobs/"
_SERVING = "/serving"


def _key(job: str, name: str) -> str:
    return f"{JOBS}{quote(job, safe='')}/{name}"


def epoch_key(job: str) -> str:
    return _key(job, "epoch")


def world_key(job: str) -> str:
    return _key(job, "world")


def gone_key(job: str) -> str:
    return _key(job, "gone")


def serving_key(job: str) -> str:
    return _key(job, "serving")


def is_serving_key(key: str) -> bool:
    return key.endswith(_SERVING)


async def claim(store: Store, job: str, serving: membership_pb2.Serving, found: Entry | None) -> Guard | None:
    """Makes `serving` the one that serves the job, in place of `found`; None when another coordinator was faster."""
    key, value = serving_key(job), serving.SerializeToString(deterministic=True)
    try:
        entry = await store.put_if(key, value, found.revision if found else MISSING)
    except UncertainError:
        entry = await store.get(key)
        if entry and entry.value != value:  # `value` names one process, which asks once at a time
            entry = None
        if entry and found and entry.revision == found.revision:  # an earlier one of this process; not replaced yet
            entry = None
    return Guard(key, entry.revision) if entry else None


async def release(store: Store, guard: Guard) -> None:
    """Releases the job; nothing happens when another coordinator serves it by now."""
    await store.delete(guard.key, guard.revision)


async def next_epoch(store: Store, job: str) -> int:
    """Raises the job's epoch counter by one, also while other coordinators do so, and returns it."""
    while True:
        current = await store.get(epoch_key(job))
        epoch = int(current.value) + 1 if current else 1
        # When it is uncertain whether this number was taken, the next one is: a number may be left out, but none is
        # given twice.
        with contextlib.suppress(UncertainError):
            if await store.put_if(epoch_key(job), b"%d" % epoch, current.revision if current else MISSING):
                return epoch


async def publish_world(store: Store, record: membership_pb2.WorldRecord, guard: Guard | None = None) -> Entry | None:
    """Makes its world the current one of its job; None if a later one is there already."""
    world = record.world
    value = record.SerializeToString(deterministic=True)
    while True:
        current = await store.get(world_key(world.job))
        if current and current.value == value:  # an uncertain write that has happened: no other world has its secret
            return current
        if current and membership_pb2.WorldRecord.FromString(current.value).world.epoch > world.epoch:
            return None
        with contextlib.suppress(UncertainError):
            revision = current.revision if current else MISSING
            if entry := await store.put_if(world_key(world.job), value, revision, guard=guard):
                return entry


async def retract_world(store: Store, job: str, revision: int, guard: Guard | None = None) -> None:
    """Deletes what `publish_world` wrote, and who of it was gone, unless a later world has replaced it."""
    gone = await store.get(gone_key(job))
    if await store.delete(world_key(job), revision, guard=guard) and gone is not None:
        await store.delete(gone_key(job), gone.revision, guard=guard)


async def write_gone(store: Store, job: str, record: membership_pb2.GoneRecord, guard: Guard) -> None:
    """Safe to do again: what is written later holds all of what was written before."""
    await store.put(gone_key(job), record.SerializeToString(deterministic=True), guard=guard)


async def read_world(
    store: Store, job: str
) -> tuple[membership_pb2.WorldRecord, int, membership_pb2.GoneRecord] | None:
    """The current world with its revision, and who of it is gone; None when the job has none."""
    found = await store.get(world_key(job))
    if found is None:
        return None
    record = membership_pb2.WorldRecord.FromString(found.value)
    gone = membership_pb2.GoneRecord(epoch=record.world.epoch)
    if (written := await store.get(gone_key(job))) is not None:
        read = membership_pb2.GoneRecord.FromString(written.value)
        if read.epoch == gone.epoch:
            gone = read
    return record, found.revision, gone
