"""The keys of archives of code: one that says how long it is when all of it is there, and one for each chunk."""

from collections.abc import Mapping

from .base import Store

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
