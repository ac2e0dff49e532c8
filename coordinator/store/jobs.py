"""The keys of a job: its epoch counter, which never goes back, who serves it, its current world, who of that is gone.

The coordinator that serves the job decides for it, as long as the entry that says so is the one that it wrote: every
decision is written under that guard (`Guard`), so one that was replaced can decide nothing more. FencedError tells it.
"""

import contextlib
from urllib.parse import quote, unquote

from horovod.protos.v1 import membership_pb2

from .base import MISSING, Entry, Guard, Store, UncertainError, WritesRefusedError
from .holding import take
from .records import story_key

JOBS = "jobs/"
PART_BYTES = 1 << 20  # a longer value is written in parts: the record of a world of 65,536 members has 10 MB
KEPT_EPOCH_S = 24 * 3600.0  # for so long the counter of a job stays that no coordinator serves
MAX_GONE_BYTES = 1_400_000
TOLD_GONE = 1000  # if the record of all members that are gone is too long, so many keep their sentences
_SERVING = "/serving"


def _key(job: str, name: str) -> str:
    return f"{JOBS}{quote(job, safe='')}/{name}"


def epoch_key(job: str) -> str:
    return _key(job, "epoch")


def world_key(job: str) -> str:
    return _key(job, "world")


def gone_key(job: str) -> str:
    return _key(job, "gone")


def part_key(job: str, epoch: int, index: int) -> str:
    return f"{_parts(job)}{epoch:020d}/{index:05d}"


def _parts(job: str) -> str:
    return _key(job, "part/")


def serving_key(job: str) -> str:
    return _key(job, "serving")


def job_of(key: str) -> str:
    """The job that a key belongs to."""
    return unquote(key.removeprefix(JOBS).partition("/")[0])


def is_serving_key(key: str) -> bool:
    return key.endswith(_SERVING)


async def claim(store: Store, job: str, serving: membership_pb2.Serving, found: Entry | None) -> Guard | None:
    """Makes `serving` the one that serves the job, in place of `found`; None as with `holding.take`."""
    return await take(store, serving_key(job), serving, found)


async def expire_epoch(store: Store, job: str, guard: Guard) -> None:
    """Lets the store delete the job's epoch counter KEPT_EPOCH_S from now, unless a world forms before.

    Called when no coordinator serves the job any more. A job that is started again before then continues the count; one
    that is started later begins again, so two of its worlds may have the same epoch. They can't be confused: a member
    of the old world that comes back has to prove its membership with a secret, which the new world does not have.
    """
    if (current := await store.get(epoch_key(job))) is None:
        return
    with contextlib.suppress(WritesRefusedError, UncertainError):  # else elsewhere.py finds the job later
        lease = await store.grant(KEPT_EPOCH_S)
        await store.put_if(epoch_key(job), current.value, current.revision, lease, guard=guard)


async def forget_job(store: Store, job: str) -> None:
    """Deletes all that the store has of the worlds of a job that no process will ever join again."""
    for entry in (await store.range(_key(job, "")))[0]:
        await store.delete(entry.key, entry.revision)
    await store.delete(story_key(job))


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
    if len(value) > PART_BYTES:
        value = await _write_parts(store, record, value, guard)
    while True:
        current = await store.get(world_key(world.job))
        if current and current.value == value:  # the uncertain write did happen: no other world has this secret
            return current
        if current and membership_pb2.WorldRecord.FromString(current.value).world.epoch > world.epoch:
            return None
        with contextlib.suppress(UncertainError):
            revision = current.revision if current else MISSING
            if entry := await store.put_if(world_key(world.job), value, revision, guard=guard):
                if current is not None:
                    await _delete_parts(store, membership_pb2.WorldRecord.FromString(current.value), guard)
                return entry


async def _write_parts(store: Store, record: membership_pb2.WorldRecord, value: bytes, guard: Guard | None) -> bytes:
    """Writes the parts of a long record. Returns the value for the world's own entry, which refers to them."""
    job, epoch = record.world.job, record.world.epoch
    parts = [value[start : start + PART_BYTES] for start in range(0, len(value), PART_BYTES)]
    for index, part in enumerate(parts):
        await _write_again(store, part_key(job, epoch, index), part, guard)
    world = membership_pb2.World(job=job, epoch=epoch, secret=record.world.secret)
    return membership_pb2.WorldRecord(world=world, parts=len(parts)).SerializeToString(deterministic=True)


async def _write_again(store: Store, key: str, value: bytes, guard: Guard | None) -> None:
    """Repeats a write that may be done twice, until it is certain to have happened."""
    while True:
        with contextlib.suppress(UncertainError):
            await store.put(key, value, guard=guard)
            return


async def _delete_parts(store: Store, head: membership_pb2.WorldRecord, guard: Guard | None) -> None:
    for index in range(head.parts):
        await store.delete(part_key(head.world.job, head.world.epoch, index), guard=guard)


async def retract_world(store: Store, job: str, revision: int, guard: Guard | None = None) -> None:
    """Deletes what `publish_world` wrote, and who of it was gone, unless a later world has replaced it."""
    gone = await store.get(gone_key(job))
    parts, _ = await store.range(_parts(job))  # also the parts of worlds that were never published
    if await store.delete(world_key(job), revision, guard=guard) and gone is not None:
        await store.delete(gone_key(job), gone.revision, guard=guard)
    for part in parts:
        await store.delete(part.key, part.revision, guard=guard)


async def keep_work(store: Store, record: membership_pb2.WorldRecord, guard: Guard) -> None:
    """Replaces the world of an elastic job of which no process is left by what those must know that come later, for
    KEPT_EPOCH_S.
    """
    job = record.world.job
    lease = await store.grant(KEPT_EPOCH_S)
    await store.put(world_key(job), record.SerializeToString(deterministic=True), lease, guard=guard)
    await store.delete(gone_key(job), guard=guard)
    for part in (await store.range(_parts(job)))[0]:
        await store.delete(part.key, part.revision, guard=guard)


async def write_gone(store: Store, job: str, record: membership_pb2.GoneRecord, guard: Guard) -> None:
    """Writes who of the world is gone. May be repeated: a later record holds all of an earlier one."""
    if record.ByteSize() > MAX_GONE_BYTES:
        brief = (one if index < TOLD_GONE else _brief(one) for index, one in enumerate(record.gone))
        record = membership_pb2.GoneRecord(epoch=record.epoch, gone=brief, work=record.work)
    await store.put(gone_key(job), record.SerializeToString(deterministic=True), guard=guard)


def _brief(one: membership_pb2.MemberGone) -> membership_pb2.MemberGone:
    return membership_pb2.MemberGone(
        epoch=one.epoch,
        rank=one.rank,
        orderly=one.orderly,
        returns=one.returns,
        done=one.done,
        may_live=one.may_live,
    )


async def read_world(
    store: Store, job: str
) -> tuple[membership_pb2.WorldRecord, int, membership_pb2.GoneRecord] | None:
    """The current world with its revision, and who of it is gone; None when the job has none."""
    found = await store.get(world_key(job))
    if found is None:
        return None
    record = membership_pb2.WorldRecord.FromString(found.value)
    if record.parts:
        entries = [await store.get(part_key(job, record.world.epoch, index)) for index in range(record.parts)]
        if None in entries:
            return None  # the world has just been replaced or retracted
        record = membership_pb2.WorldRecord.FromString(b"".join(entry.value for entry in entries if entry))
    gone = membership_pb2.GoneRecord(epoch=record.world.epoch)
    if (written := await store.get(gone_key(job))) is not None:
        read = membership_pb2.GoneRecord.FromString(written.value)
        if read.epoch == gone.epoch:
            gone = read
    for one in gone.gone:
        one.sentence = one.sentence or f"Rank {one.rank} is gone."
    return record, found.revision, gone
