"""``init_method="horovod://"``: the default group is the world of Horovod, however its processes were started.

torch wants a key-value store from each way to begin. On one host it is a file in a folder that only this user can
open, else a server of torch's in the process of rank 0.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch.distributed

from horovod.common import basics
from horovod.torch.distributed import groups
from horovod.worker.runtime.context import is_member

dist: Final[Any] = torch.distributed  # its stubs do not say all that its C++ classes have


def rendezvous(url: str, timeout: timedelta = dist.default_pg_timeout, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """The handler that torch calls; url: "horovod://"."""
    from horovod.torch.functions import allgather_object, broadcast_object

    del url
    if not is_member():
        basics.init()
        groups.world_began()
    rank, size = basics.rank(), basics.size()
    if size == 1:
        store: Any = dist.HashStore()
    elif len(set(allgather_object(groups.place_of_process(), name="torch.distributed.places"))) == 1:
        from horovod.rendezvous.meeting import folder

        path: Any = f"{folder()}/torch-{secrets.token_hex(16)}" if rank == 0 else None
        store = dist.FileStore(broadcast_object(path, 0, name="torch.distributed.store"), size)
    else:
        from horovod.rendezvous.join import own_address

        where: Any = None
        if rank == 0:
            address = own_address()
            store = dist.TCPStore(address, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
            where = address, store.port
        address, port = broadcast_object(where, 0, name="torch.distributed.store")
        if rank != 0:
            store = dist.TCPStore(address, port, size, is_master=False, timeout=timeout)
    store.set_timeout(timeout)
    yield store, rank, size
    raise RuntimeError("The world of Horovod does not begin again by itself.")
