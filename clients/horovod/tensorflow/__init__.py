"""Horovod for TensorFlow:

>>> import horovod.tensorflow as hvd
>>> hvd.init()
>>> hvd.broadcast_variables(model.variables, root_rank=0)
>>> average = hvd.allreduce(loss)
>>> tape = hvd.DistributedGradientTape(tape)  # or hvd.DistributedOptimizer(optimizer)

Everything public is a name of this module.
"""

from typing import TYPE_CHECKING

try:
    import tensorflow  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f"horovod.tensorflow needs TensorFlow, which is not installed ({error}). Install it with: "
        "pip install 'horovod[tensorflow]'"
    ) from error

from horovod import _core  # noqa: F401  (a missing native engine must fail here, not in hvd.init)
from horovod.common import names as _names
from horovod.common import signatures as _signatures
from horovod.common.basics import is_homogeneous as is_homogeneous
from horovod.common.names import *  # noqa: F403
from horovod.common.util import check_num_rank_power_of_2 as check_num_rank_power_of_2
from horovod.tensorflow import elastic as elastic
from horovod.tensorflow import functions as _functions
from horovod.tensorflow import ops as _ops
from horovod.tensorflow.compression import Compression as Compression
from horovod.tensorflow.functions import *  # noqa: F403
from horovod.tensorflow.ops import *  # noqa: F403
from horovod.tensorflow.optimizer import DistributedOptimizer as DistributedOptimizer
from horovod.tensorflow.tape import DistributedGradientTape as DistributedGradientTape
from horovod.tensorflow.tape import PartialDistributedGradientTape as PartialDistributedGradientTape

if not TYPE_CHECKING:  # mypy knows no lists in a list; for it, what has no _ and is not only imported is public
    __all__ = [*_names.__all__, *_ops.__all__, *_functions.__all__, "Compression", "elastic"]  # noqa: PLE0604
    __all__ += ["DistributedGradientTape", "DistributedOptimizer", "PartialDistributedGradientTape"]
    __all__ += ["check_num_rank_power_of_2", "is_homogeneous"]

# Scripts write hvd.mpi_ops.Sum. After all others, because it takes all names from here.
from horovod.tensorflow import mpi_ops as mpi_ops
from horovod.tensorflow.util import _allreduce as _allreduce
from horovod.tensorflow.util import _DistributedOptimizer as _DistributedOptimizer
from horovod.tensorflow.util import _executing_eagerly as _executing_eagerly
from horovod.tensorflow.util import _LegacyOptimizer as _LegacyOptimizer
from horovod.tensorflow.util import _make_allreduce_grads_fn as _make_allreduce_grads_fn
from horovod.tensorflow.util import gpu_available as gpu_available
from horovod.tensorflow.util import (
    handle_average_backwards_compatibility as handle_average_backwards_compatibility,
)

_signatures.name_reductions(globals())


def __getattr__(name: str) -> object:
    """A layer of Keras, which takes seconds to import: not before it is asked for."""
    if name != "SyncBatchNormalization":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

    return SyncBatchNormalization
