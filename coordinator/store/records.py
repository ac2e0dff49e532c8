"""The keys of submitted jobs, archives of code, and stories of jobs; jobs.py has those of worlds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote, unquote

from horovod.protos.v1 import jobs_pb2, story_pb2

from .base import Guard, LeaseLostError, Store

SUBMITTED = "submitted/"


def submitted_key(job: str) -> str:
    return SUBMITTED + quote(job, safe="")


def submitted_job(key: str) -> str:
    """The job whose `submitted_key` that is."""
    return unquote(key.removeprefix(SUBMITTED))


async def read_records(store: Store) -> Sequence[tuple[jobs_pb2.JobRecord, int]]:
    """Every job that is kept, with the revision of its record."""
    entries, _ = await store.range(SUBMITTED)
    return [(jobs_pb2.JobRecord.FromString(entry.value), entry.revision) for entry in entries]


# The keys of archives of code: one that says how long it is when all of it is there, and one for each chunk.

ARCHIVES = "code/archive/"
CHUNKS = "code/chunk/"


def archive_key(name: str) -> str:
    return ARCHIVES + name


def chunk_key(name: str, index: int) -> str:
    return f"{CHUNKS}{name}/{index:05d}"


async def read_archives(store: Store) -> Mapping[str, tuple[int, bool]]:
    """name -> how many bytes the archive has, and whether all of it is there."""
    entries, _ = await store.range(ARCHIVES)
    found = {}
    for entry in entries:
        size, _, complete = entry.value.partition(b" ")
        found[entry.key.removeprefix(ARCHIVES)] = (int(size), complete == b"complete")
    return found


def archive_value(size: int, *, complete: bool) -> bytes:
    return f"{size} {'complete' if complete else 'begun'}".encode()


# The keys of stories of jobs (core/world/story.py), beside those of their worlds (jobs.py): nothing depends on them.
#
# Each is under a lease, which whoever serves the job prolongs. So a story stays a day after its job is over, and none
# stays for ever, whatever has become of its coordinator. It goes on when the job is started again meanwhile.

STORIES = "stories/"
KEPT_STORY_S = 24 * 3600.0


def story_key(job: str) -> str:
    return STORIES + quote(job, safe="")


async def write_story(store: Store, record: story_pb2.JobStory, guard: Guard, lease: int | None) -> int:
    """lease: of the last write. Returns that of this one."""
    if lease is not None:
        try:
            await store.keep_alive(lease)
        except LeaseLostError:
            lease = None
    if lease is None:
        lease = await store.grant(KEPT_STORY_S)
    await store.put(story_key(record.job), record.SerializeToString(deterministic=True), lease, guard=guard)
    return lease


async def read_story(store: Store, job: str) -> story_pb2.JobStory | None:
    found = await store.get(story_key(job))
    return story_pb2.JobStory.FromString(found.value) if found is not None else None


async def read_stories(store: Store) -> Sequence[story_pb2.JobStory]:
    """Of all jobs."""
    entries, _ = await store.range(STORIES)
    return [story_pb2.JobStory.FromString(entry.value) for entry in entries]
