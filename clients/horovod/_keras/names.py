"""Public names that are the same object in horovod.keras and in horovod.tensorflow.keras."""

from __future__ import annotations

from typing import TYPE_CHECKING

from horovod._keras.api import (
    PartialDistributedOptimizer as PartialDistributedOptimizer,
)
from horovod._keras.api import allgather as allgather
from horovod._keras.api import allreduce as allreduce
from horovod._keras.api import barrier as barrier
from horovod._keras.api import broadcast as broadcast
from horovod._keras.api import reducescatter as reducescatter
from horovod.common import names as _names
from horovod.common.basics import is_homogeneous as is_homogeneous
from horovod.common.names import *  # noqa: F403
from horovod.common.ops.objects import allgather_object as allgather_object
from horovod.common.ops.objects import broadcast_object as broadcast_object

if not TYPE_CHECKING:  # mypy knows no lists in a list; for it, what has no _ and is not only imported is public
    __all__ = [*_names.__all__, "PartialDistributedOptimizer", "allgather", "allgather_object"]  # noqa: PLE0604
    __all__ += ["allreduce", "barrier", "broadcast", "broadcast_object", "is_homogeneous", "reducescatter"]
