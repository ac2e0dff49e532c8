"""Horovod for TensorFlow:

>>> import horovod.tensorflow as hvd
>>> hvd.init()
>>> hvd.broadcast_variables(model.variables, root_rank=0)
>>> average = hvd.allreduce(loss)
>>> tape = hvd.DistributedGradientTape(tape)  # or hvd.DistributedOptimizer(optimizer)

Everything public is a name of this module.
"""

try:
    import tensorflow  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f"horovod.tensorflow needs TensorFlow, which is not installed ({error}). Install it with: "
        "pip install 'horovod[tensorflow]'"
    ) from error

from horovod import _core  # noqa: F401  (a missing native engine must fail here, not in hvd.init)
from horovod.common.basics import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from horovod.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.common.util import num_rank_is_power_2 as check_num_rank_power_of_2
from horovod.tensorflow import elastic
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from horovod.tensorflow.ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from horovod.tensorflow.optimizer import DistributedOptimizer
from horovod.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

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


def __getattr__(name: str) -> object:
    """A layer of Keras, which takes seconds to import: not before it is asked for."""
    if name != "SyncBatchNormalization":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

    return SyncBatchNormalization
