"""The keys of stories of jobs (core/world/story.py), beside those of their worlds (jobs.py): nothing depends on them.

Each is under a lease, which whoever serves the job prolongs. So a story stays a day after its job is over, and none
stays for ever, whatever has become of its coordinator. It goes on when the job is started again meanwhile.
"""

from collections.abc import Sequence
from urllib.parse import quote

from horovod.protos.v1 import story_pb2

from .base import Guard, LeaseLostError, Store

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
