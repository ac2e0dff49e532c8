"""The keys of a job: its epoch counter, which never goes back, and its current world."""

from urllib.parse import quote

from horovod.protos.v1 import membership_pb2

from .base import MISSING, Entry, Store


def epoch_key(job: str) -> str:
    return f"jobs/{quote(job, safe='')}/epoch"


def world_key(job: str) -> str:
    return f"jobs/{quote(job, safe='')}/world"


async def next_epoch(store: Store, job: str) -> int:
    """Raises the job's epoch counter by one, whoever else does the same, and returns it."""
    while True:
        current = await store.get(epoch_key(job))
        epoch = int(current.value) + 1 if current else 1
        if await store.put_if(epoch_key(job), b"%d" % epoch, current.revision if current else MISSING):
            return epoch


async def publish_world(store: Store, world: membership_pb2.World) -> Entry | None:
    """Makes `world` the current one of its job; None if a later one is there already."""
    while True:
        current = await store.get(world_key(world.job))
        if current and membership_pb2.World.FromString(current.value).epoch > world.epoch:
            return None
        entry = await store.put_if(
            world_key(world.job), world.SerializeToString(), current.revision if current else MISSING
        )
        if entry:
            return entry


async def retract_world(store: Store, job: str, revision: int) -> None:
    """Takes back what `publish_world` wrote, unless a later world has replaced it."""
    await store.delete(world_key(job), revision)
