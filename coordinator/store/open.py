"""The store that a piece of text names: `memory:`, `sqlite:PATH` (sqlite.py), or `etcd://...` (etcd_address.py)."""

from pathlib import Path

from horovod.base.errors import SettingCode, coded

from .base import Store
from .memory import MemoryStore
from .seal import Seal

MEMORY = "memory:"
SQLITE = "sqlite:"
ETCD = "etcd:"


def open_store(text: str, seal: Seal | None = None) -> Store:
    """Makes no connection yet, but opens a file. Raises ValueError, or OSError for that file, with a sentence.

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
