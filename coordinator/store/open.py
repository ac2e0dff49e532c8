"""The store that a piece of text names: `memory:`, or `etcd://...` (etcd_address.py)."""

from .base import Store
from .memory import MemoryStore

MEMORY = "memory:"


def open_store(text: str) -> Store:
    """Makes no connection yet. Raises ValueError with a sentence."""
    if text == MEMORY:
        return MemoryStore()
    if text.startswith("etcd:"):
        from .etcd import EtcdStore
        from .etcd_address import EtcdAddress

        return EtcdStore(EtcdAddress.parse(text))
    raise ValueError(f"There is no store {text!r}; expected 'memory:' or something like 'etcd://h1:2379,h2:2379'.")
