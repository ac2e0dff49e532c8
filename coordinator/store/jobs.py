"""The keys of a job: its epoch counter, which never goes back, and its current world."""

import contextlib
from urllib.parse import quote

from horovod.protos.v1 import membership_pb2

from .base import MISSING, Entry, Store, UncertainError


def epoch_key(job: str) -> str:
    return f"jobs/{quote(job, safe='')}/epoch"


def world_key(job: str) -> str:
    return f"jobs/{quote(job, safe='')}/world"


async def next_epoch(store: Store, job: str) -> int:
    """Raises the job's epoch counter by one, whoever else does the same, and returns it."""
    while True:
        current = await store.get(epoch_key(job))
        epoch = int(current.value) + 1 if current else 1
        # When it is uncertain whether this number was taken, the next one is: a number may be left out, but none is
        # given twice.
        with contextlib.suppress(UncertainError):
            if await store.put_if(epoch_key(job), b"%d" % epoch, current.revision if current else MISSING):
                return epoch


async def publish_world(store: Store, world: membership_pb2.World) -> Entry | None:
    """Makes `world` the current one of its job; None if a later one is there already."""
    value = world.SerializeToString(deterministic=True)
    while True:
        current = await store.get(world_key(world.job))
        if current and current.value == value:  # an uncertain write that has happened: no other world has its secret
            return current
        if current and membership_pb2.World.FromString(current.value).epoch > world.epoch:
            return None
        with contextlib.suppress(UncertainError):
            entry = await store.put_if(world_key(world.job), value, current.revision if current else MISSING)
            if entry:
                return entry


async def retract_world(store: Store, job: str, revision: int) -> None:
    """Deletes what `publish_world` wrote, unless a later world has replaced it."""
    await store.delete(world_key(job), revision)
