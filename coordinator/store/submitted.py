"""The keys of submitted jobs and agents, and of the coordinator that serves them."""

from collections.abc import Sequence
from urllib.parse import quote, unquote

from horovod.protos.v1 import jobs_pb2

from .base import Store

SUBMITTED = "submitted/"
AGENTS = "agents/"


def submitted_key(job: str) -> str:
    return SUBMITTED + quote(job, safe="")


def job_of(key: str) -> str:
    """The job whose `submitted_key` that is."""
    return unquote(key.removeprefix(SUBMITTED))


def agent_key(name: str) -> str:
    return AGENTS + quote(name, safe="")


async def read_records(store: Store) -> Sequence[tuple[jobs_pb2.JobRecord, int]]:
    """Every job that is kept, with the revision of its record."""
    entries, _ = await store.range(SUBMITTED)
    return [(jobs_pb2.JobRecord.FromString(entry.value), entry.revision) for entry in entries]
