"""Horovod as a backend of torch.distributed: DistributedDataParallel, FSDP and what builds on them, over its engine.

Importing this module registers the backend ``horovod``:

    >>> import torch.distributed as dist
    >>> import horovod.torch.distributed
    >>> dist.init_process_group("horovod")  # under torchrun; or with an init_method, rank and world_size

Under horovodrun, and wherever hvd.init() finds its world by itself, say ``init_method="horovod://"``. The processes of
the default group form a world of Horovod, or are in one already: `hvd.*` and `dist.*` share it. Tensors are on CPUs.
There is no point-to-point communication yet (`dist.send`, `dist.recv`).
"""

from __future__ import annotations

import importlib as _importlib

import torch.distributed as _dist

from horovod.torch.distributed.process_group import make_group
from horovod.torch.distributed.rendezvous import rendezvous

if _dist.is_available() and "HOROVOD" not in _dist.Backend._plugins:
    _dist.Backend.register_backend("horovod", make_group, extended_api=True, devices=["cpu"])
    _importlib.import_module("torch.distributed.rendezvous").register_rendezvous_handler("horovod", rendezvous)
