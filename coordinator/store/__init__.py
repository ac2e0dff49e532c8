"""What a coordinator must not forget: the epoch counter and the current world of each job.

Written on membership changes only, never per training step, and always by compare-and-swap, so that any number of
coordinators may share one store. `memory` is the embedded default and ends with its coordinator, `sqlite` is a file
that outlives it, and `etcd` is shared by several.
"""

from __future__ import annotations

from pathlib import Path

from horovod.base.errors import SettingCode, coded

from .base import (
    Change,
    CompactedError,
    Entry,
    FencedError,
    Guard,
    LeaseLostError,
    Store,
    StoreError,
    StoreFormatError,
    StoreKeyError,
    TooLargeError,
    UncertainError,
    WritesRefusedError,
)
from .memory import MemoryStore
from .seal import Seal

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
    "StoreFormatError",
    "StoreKeyError",
    "TooLargeError",
    "UncertainError",
    "WritesRefusedError",
    "open_store",
]

MEMORY = "memory:"
SQLITE = "sqlite:"
ETCD = "etcd:"


def open_store(text: str, seal: Seal | None = None) -> Store:
    """The store that `text` names: `memory:`, `sqlite:PATH` (sqlite.py), or `etcd://...` (etcd_address.py).

    Makes no connection yet, but opens a file. Raises ValueError, or OSError for that file, with a sentence.

    seal: of what stands in etcd; the other stores are for one coordinator, and nobody else can write to them.
    """
    if text == MEMORY:
        return MemoryStore()
    if text.startswith(SQLITE):
        from .sqlite import SqliteStore

        if not (path := text.removeprefix(SQLITE)) or path.endswith("/"):
            sentence = f"The store {text!r} names no file; expected something like 'sqlite:/var/lib/horovod/store'."
            raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
        return SqliteStore(Path(path))
    if text.startswith(ETCD):
        from .etcd import EtcdStore
        from .etcd_address import EtcdAddress

        return EtcdStore(EtcdAddress.parse(text), seal=seal)
    sentence = (
        f"There is no store {text!r}; expected 'memory:', 'sqlite:PATH' or something like 'etcd://h1:2379,h2:2379'."
    )
    raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
