"""What a coordinator must not forget: the epoch counter and the current world of each job.

Written on membership changes only, never per training step, and always by compare-and-swap, so that any number of
coordinators may share one store. `memory` is the embedded default and ends with its coordinator, `sqlite` is a file
that outlives it, and `etcd` is shared by several.
"""

from .base import (
    Change,
    CompactedError,
    Entry,
    FencedError,
    Guard,
    LeaseLostError,
    Store,
    StoreError,
    StoreKeyError,
    TooLargeError,
    UncertainError,
    WritesRefusedError,
)
from .memory import MemoryStore
from .open import open_store

__all__ = [
    "Change",
    "CompactedError",
    "Entry",
    "FencedError",
    "Guard",
    "LeaseLostError",
    "MemoryStore",
    "Store",
    "StoreError",
    "StoreKeyError",
    "TooLargeError",
    "UncertainError",
    "WritesRefusedError",
    "open_store",
]
