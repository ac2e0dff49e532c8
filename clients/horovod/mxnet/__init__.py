"""Horovod for MXNet:

>>> import horovod.mxnet as hvd
>>> hvd.init()
>>> hvd.broadcast_parameters(model.collect_params(), root_rank=0)
>>> trainer = hvd.DistributedTrainer(model.collect_params(), "sgd", {"learning_rate": 0.1 * hvd.size()})

Everything public is a name of this module.
"""

from typing import TYPE_CHECKING

try:
    import mxnet  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f"horovod.mxnet needs MXNet, which is not installed ({error}). Install it with: pip install 'horovod[mxnet]'"
    ) from error
except AttributeError as error:
    raise ImportError(
        f"MXNet can't be imported with this NumPy ({error}). Install one that it knows: pip install 'horovod[mxnet]'"
    ) from error

from horovod import _core  # noqa: F401  (a missing native engine must fail here, not in hvd.init)
from horovod.common import names as _names
from horovod.common import signatures as _signatures
from horovod.common.basics import is_homogeneous as is_homogeneous
from horovod.common.exceptions import HorovodInternalError as HorovodInternalError
from horovod.common.names import *  # noqa: F403
from horovod.common.ops import faces as _faces
from horovod.mxnet import asynchronous as _asynchronous
from horovod.mxnet import elastic as elastic
from horovod.mxnet import functions as _functions
from horovod.mxnet import mpi_ops as _mpi_ops
from horovod.mxnet.asynchronous import *  # noqa: F403
from horovod.mxnet.compression import Compression as Compression
from horovod.mxnet.functions import *  # noqa: F403
from horovod.mxnet.mpi_ops import *  # noqa: F403
from horovod.mxnet.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from horovod.mxnet.training import DistributedOptimizer as DistributedOptimizer
from horovod.mxnet.training import DistributedTrainer as DistributedTrainer

if not TYPE_CHECKING:  # mypy knows no lists in a list; for it, what has no _ and is not only imported is public
    __all__ = [*_names.__all__, *_mpi_ops.__all__, *_asynchronous.__all__, *_functions.__all__]  # noqa: PLE0604
    __all__ += ["Compression", "DistributedOptimizer", "DistributedTrainer", "HorovodInternalError", "SyncBatchNorm"]
    __all__ += ["elastic", "is_homogeneous"]

_faces.complete(_faces.MXNET, globals())
_signatures.name_reductions(globals())
