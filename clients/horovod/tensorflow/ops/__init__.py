"""The collectives on TensorFlow's tensors, one module for each."""

from horovod.common.ops.faces import TENSORFLOW, complete
from horovod.tensorflow.library import as_it_is
from horovod.tensorflow.ops import vectorized as _rules  # noqa: F401  (for tf.vectorized_map and tape.jacobian)
from horovod.tensorflow.ops.allgather import allgather, grouped_allgather
from horovod.tensorflow.ops.allreduce import allreduce, grouped_allreduce
from horovod.tensorflow.ops.alltoall import alltoall
from horovod.tensorflow.ops.barrier import barrier
from horovod.tensorflow.ops.broadcast import broadcast, broadcast_
from horovod.tensorflow.ops.join import join
from horovod.tensorflow.ops.reducescatter import grouped_reducescatter, reducescatter
from horovod.tensorflow.ops.world import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]

complete(TENSORFLOW, globals())
as_it_is(
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
