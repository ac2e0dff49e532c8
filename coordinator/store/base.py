"""The Store protocol: keys with revisions, compare-and-swap, leases and watches that resume.

The revision is one counter of the whole store. Every successful write or deletion raises it; an entry carries the
revision of its latest write. That makes compare-and-swap a comparison of revisions, and a watch resumable: whoever
has seen everything up to revision r continues at r + 1 and misses nothing.

    StoreError              the store can't be reached or does not do what it should; try again later
     +- CompactedError      a watch wants changes that are no longer kept; read the range again, then watch from there
     +- StoreFormatError    another release has written there what this one can't read
     +- StoreKeyError       what stands there was not sealed with a key that this coordinator has
     +- FencedError         the guard of a write does not hold any more; nothing was written, and nothing will be
     +- LeaseLostError      the lease ended before; take a new one and write again
     +- TooLargeError       a value is longer than a store takes; the same write would be refused each time
     +- UncertainError      a write may have happened or not; read again, then decide
     +- WritesRefusedError  it takes no writes until a person does something (no room is left, it may only be read);
                            reads and deletions may go on
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from horovod.base.errors import ClusterCode, ErrorCode, coded

MISSING = 0  # the revision of a key that does not exist
# Of the key and the value of one write, on every store. etcd takes requests of 1.5 MiB unless told otherwise; what is
# left of that is for the names of guards and of clusters.
MAX_WRITE_BYTES = 1_500_000


class StoreError(Exception):
    """The store can't be reached or does not do what it should."""

    code: ErrorCode | None = ClusterCode.STORE_FAILED  # None: no person meets this error

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence if self.code is None else coded(self.code, sentence))


class CompactedError(StoreError):
    """A watch wants changes that are no longer kept."""

    code = None


class FencedError(StoreError):
    """The guard of a write does not hold: its key has been written by another client since."""

    code = None


class StoreFormatError(StoreError):
    """Another release has written to the store what this one can't read, or would not be understood by."""

    code = ClusterCode.STORE_FORMAT


class StoreKeyError(StoreError):
    """What stands in the store was not sealed with a key that this coordinator has."""

    code = ClusterCode.STORE_KEY


class LeaseLostError(StoreError):
    """The lease ended before this call."""

    code = None


class TooLargeError(StoreError):
    """The value of a write is longer than the store takes."""

    code = ClusterCode.TOO_LARGE_FOR_STORE


class UncertainError(StoreError):
    """The answer to a write was lost, so that it may have happened or not."""

    code = ClusterCode.STORE_WRITE_UNSURE


class WritesRefusedError(StoreError):
    """The store takes no writes until a person does something; the sentence says what."""

    code = ClusterCode.STORE_TAKES_NO_WRITES


def check_size(key: str, value: bytes) -> None:
    """Raises TooLargeError for what no store takes."""
    if (size := len(key) + len(value)) > MAX_WRITE_BYTES:
        raise TooLargeError(f"{key} and its value have {size:,} bytes: a store takes at most {MAX_WRITE_BYTES:,}.")


@dataclass(frozen=True)
class Entry:
    key: str
    value: bytes
    revision: int  # the store's revision after the latest write of the key


@dataclass(frozen=True)
class Change:
    """A write (`value`) or a deletion (None)."""

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True)
class Guard:
    """What must hold in the moment of a write: the latest write of `key` was `revision` (MISSING: there is none)."""

    key: str
    revision: int


class Store(Protocol):
    @property
    def is_shared(self) -> bool:
        """Whether other coordinators may use it at the same time."""

    async def get(self, key: str) -> Entry | None:
        """The entry, or None."""

    async def range(self, prefix: str) -> tuple[Sequence[Entry], int]:
        """Entries whose keys begin with `prefix`, in key order, and the store's revision at that moment."""

    async def put(self, key: str, value: bytes, lease: int | None = None, *, guard: Guard | None = None) -> Entry:
        """Writes, whatever the key's revision. An entry with a lease is deleted when that ends. Raises LeaseLostError.

        guard: nothing is written unless it holds (FencedError), which is looked at in the same step.

        This and the other writes raise UncertainError where their answer is lost, TooLargeError for more than
        MAX_WRITE_BYTES, and WritesRefusedError.
        """

    async def put_if(
        self, key: str, value: bytes, revision: int, lease: int | None = None, *, guard: Guard | None = None
    ) -> Entry | None:
        """Writes if the key's latest write was `revision` (MISSING: if there is no such key); else None."""

    async def delete(self, key: str, revision: int | None = None, *, guard: Guard | None = None) -> bool:
        """Deletes the key, with `revision` only if that was its latest write. False if nothing was deleted."""

    async def grant(self, ttl_s: float) -> int:
        """A new lease; it ends unless kept alive at least every `ttl_s` seconds. A store may round them up."""

    async def keep_alive(self, lease: int) -> None:
        """Gives the lease another full time to live. Raises LeaseLostError."""

    async def revoke(self, lease: int) -> None:
        """Ends the lease now and deletes its entries. Nothing happens if it has ended before."""

    def watch(self, prefix: str, revision: int) -> AsyncIterator[Change]:
        """Changes of keys that begin with `prefix`, from `revision` (included) on, in order, without end.

        Raises CompactedError when `revision` is too far in the past. Close with `aclose()` or by leaving the task.
        """

    async def close(self) -> None:
        """Ends watches and forgets connections; the store must not be used afterwards."""
