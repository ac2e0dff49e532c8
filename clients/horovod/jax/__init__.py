"""Horovod for JAX:

>>> import horovod.jax as hvd
>>> hvd.init()
>>> params = hvd.broadcast_parameters(params, root_rank=0)
>>> optimizer = hvd.DistributedOptimizer(optax.adam(1e-3))
>>> opt_state = optimizer.init(params)

Everything public is a name of this module. All of it works outside of compiled functions, and the collectives of arrays
work under jax.jit and its like as well.
"""

try:
    from jax import typeof  # noqa: F401  (the youngest name that this needs)
except ModuleNotFoundError as error:
    raise ImportError(
        f"horovod.jax needs JAX, which is not installed ({error}). Install it with: pip install 'horovod[jax]'"
    ) from error
except ImportError as error:
    raise ImportError(
        f"horovod.jax needs a newer JAX than the one that is installed ({error}). Install it with: "
        "pip install --upgrade 'horovod[jax]'"
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
    size,
    start_timeline,
    stop_timeline,
)
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops import faces as _faces
from horovod.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.jax import derivatives, elastic  # noqa: F401  (the rules of the primitive)
from horovod.jax.compression import Compression
from horovod.jax.functions import (
    allgather_object,
    barrier,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    join,
    shutdown,
)
from horovod.jax.reductions import allreduce, grouped_allreduce, grouped_reducescatter, reducescatter
from horovod.jax.rows import allgather, alltoall, broadcast, grouped_allgather
from horovod.jax.training import DistributedOptimizer, grad, value_and_grad

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
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
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grad",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "value_and_grad",
]

_faces.complete(_faces.JAX, globals())
