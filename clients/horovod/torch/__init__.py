"""Horovod for PyTorch:

>>> import horovod.torch as hvd
>>> hvd.init()
>>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
>>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
>>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)

Everything public is a name of this module.
"""

from typing import TYPE_CHECKING

from horovod import _core  # noqa: F401  (a missing native engine must fail here, not in hvd.init)
from horovod.common import names as _names
from horovod.common import signatures as _signatures
from horovod.common.exceptions import HorovodInternalError as HorovodInternalError
from horovod.common.names import *  # noqa: F403
from horovod.torch import elastic as elastic
from horovod.torch import functions as _functions
from horovod.torch import handles as _handles
from horovod.torch import ops as _ops
from horovod.torch.compression import Compression as Compression
from horovod.torch.functions import *  # noqa: F403
from horovod.torch.handles import *  # noqa: F403
from horovod.torch.ops import *  # noqa: F403
from horovod.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm

if not TYPE_CHECKING:  # mypy knows no lists in a list; for it, what has no _ and is not only imported is public
    __all__ = [*_names.__all__, *_ops.__all__, *_handles.__all__, *_functions.__all__]  # noqa: PLE0604
    __all__ += ["Compression", "DistributedOptimizer", "HorovodInternalError", "SyncBatchNorm", "elastic"]

# Scripts write hvd.mpi_ops.Sum. Last, because it takes all names from here.
from horovod.torch import mpi_ops as mpi_ops

_signatures.name_reductions(globals())
