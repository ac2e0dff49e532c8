"""The archives of code that jobs run from: which are there, and which go when another one needs the room.

An archive stays as long as a job that is not over needs it, and after that until the room is needed: the one that was
used longest ago goes first. So a folder that is submitted again and again is sent once.

Pure; the chunks themselves are in the store (services/code.py).
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from horovod.base.errors import ClusterCode, coded
from horovod.protos.v1 import jobs_pb2

CHUNK_BYTES = 512 << 10  # etcd takes values of up to 1.5 MiB
MAX_CODE_BYTES = 64 << 20  # bytes of one archive
TOTAL_BYTES = 512 << 20  # a quarter of what etcd keeps unless told otherwise
_NAME = re.compile(r"[0-9a-f]{64}")


@dataclass
class Archive:
    size: int
    missing: set[int]  # chunks
    used: int = 0  # the counter of all uses when this archive was last used: the lowest was used longest ago

    @property
    def is_complete(self) -> bool:
        return not self.missing


@dataclass
class Archives:
    total_bytes: int = TOTAL_BYTES
    known: dict[str, Archive] = field(default_factory=dict)  # hash of the content -> the archive
    _uses: int = 0

    def use(self, name: str) -> None:
        """Notes that the archive was used just now, so all others are deleted before it."""
        self._uses += 1
        self.known[name].used = self._uses

    def has(self, name: str) -> bool:
        return name in self.known and self.known[name].is_complete

    def add(self, code: jobs_pb2.Code, *, complete: bool = False) -> None:
        self.known[code.sha256] = Archive(code.size, set() if complete else set(range(chunks_of(code.size))))
        self.use(code.sha256)

    def found(self, name: str, size: int) -> jobs_pb2.CodeFound:
        """The answer to a client that asks whether the archive is there."""
        archive = self.known.get(name)
        missing = set(range(chunks_of(size))) if archive is None else archive.missing
        return jobs_pb2.CodeFound(complete=not missing, chunk_bytes=CHUNK_BYTES, missing=sorted(missing))

    def in_the_way(self, code: jobs_pb2.Code, needed: Collection[str]) -> list[str] | str:
        """The archives to delete for `code`, or why that can't be. needed: archives of jobs that are not over."""
        left = self.total_bytes - sum(one.size for one in self.known.values())
        going = []
        for name in sorted(self.known.keys() - set(needed) - {code.sha256}, key=lambda name: self.known[name].used):
            if left >= code.size:
                break
            going.append(name)
            left += self.known[name].size
        if left < code.size:
            return coded(
                ClusterCode.NO_ROOM_FOR_CODE,
                f"There is no room for {code.size:,} bytes of code: at most {self.total_bytes >> 20} MiB are "
                "kept, and unfinished jobs need the code that is stored now. Submit the job again when some "
                "of them have ended.",
            )
        return going


def chunks_of(size: int) -> int:
    return -(-size // CHUNK_BYTES)


def chunk_size(size: int, index: int) -> int:
    """How many bytes the chunk with this number must have."""
    return min(CHUNK_BYTES, size - index * CHUNK_BYTES)


def refusal_of(code: jobs_pb2.Code) -> str:
    """Why this can't be an archive, as a sentence; empty when it can."""
    if not _NAME.fullmatch(code.sha256):
        return coded(ClusterCode.INVALID_JOB, "The name of the code is no SHA-256 in hexadecimal.")
    if not 0 < code.size <= MAX_CODE_BYTES:
        sentence = f"The code has {code.size:,} bytes: expected from 1 to {MAX_CODE_BYTES >> 20} MiB."
        return coded(ClusterCode.CODE_TOO_LARGE, sentence)
    return ""
