"""For each framework: which functions it has under another name, and why it lacks others.

A name is that of the framework's module. An option is written `name(option)`. Patterns are those of fnmatch; the first
one that has a reason for the framework counts.
"""

from __future__ import annotations

from typing import Final

# Public names that are not in __all__.
MORE: Final = {
    "TensorFlow": ["SyncBatchNormalization"],
    "Keras": ["SyncBatchNormalization"],
    "PyTorch": ["mpi_ops.is_homogeneous"],
    "JAX": ["linen.SyncBatchNorm", "nnx.SyncBatchNorm"],
}

# What stands for a name in a framework; the name itself too, where it is there.
INSTEAD: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "broadcast_parameters": {
        "TensorFlow": ("broadcast_variables", "broadcast_global_variables", "BroadcastGlobalVariablesHook"),
        "Keras": ("callbacks.BroadcastGlobalVariablesCallback", "broadcast_global_variables"),
    },
    "broadcast_optimizer_state": {
        "TensorFlow": ("broadcast_variables",),
        "Keras": ("callbacks.BroadcastGlobalVariablesCallback",),
    },
    "broadcast_": {"Keras": ("callbacks.BroadcastGlobalVariablesCallback",)},
    "broadcast_object": {"TensorFlow": ("broadcast_object", "broadcast_object_fn")},
    "is_homogeneous": {"PyTorch": ("mpi_ops.is_homogeneous",)},
    "sparse_allreduce_async": {"TensorFlow": ("allreduce",)},
    "DistributedOptimizer": {"MXNet": ("DistributedOptimizer", "DistributedTrainer")},
    "DistributedGradientTape": {"JAX": ("grad", "value_and_grad")},
    "PartialDistributedOptimizer": {"TensorFlow": ("PartialDistributedGradientTape",)},
    "SyncBatchNorm": {
        "TensorFlow": ("SyncBatchNormalization",),
        "Keras": ("SyncBatchNormalization",),
        "JAX": ("linen.SyncBatchNorm", "nnx.SyncBatchNorm"),
    },
    "elastic.State": {
        "PyTorch": ("elastic.TorchState",),
        "TensorFlow": ("elastic.TensorFlowState", "elastic.TensorFlowKerasState"),
        "Keras": ("elastic.KerasState",),
        "JAX": ("elastic.JaxState",),
        "MXNet": ("elastic.MXNetState",),
    },
}

# Made at run time from the framework in use, whose values it has.
AS_THE_BACKEND: Final = {("Compression", "Keras")}


def _for(reason: str, *frameworks: str) -> dict[str, str]:
    return dict.fromkeys(frameworks, reason)


_OF_THE_BACKEND: Final = _for(
    "`horovod.keras` is for Keras's own loop, `fit`. In your own loop, import this from the module of the backend "
    "(`horovod.tensorflow`, `horovod.torch`, `horovod.jax`), which belongs to the same world.",
    "Keras",
)
_HANDLES: Final = _OF_THE_BACKEND | _for(
    "The framework itself runs operations asynchronously, from its graph or its queue; `grouped_*` starts several "
    "at once.",
    "TensorFlow",
    "JAX",
)
_IN_PLACE: Final = _OF_THE_BACKEND | {
    "TensorFlow": "Tensors do not change. Assign to a variable instead: `variable.assign(hvd.allreduce(variable))`.",
    "JAX": "Arrays do not change.",
}
_OF_GRAPHS: Final = _for(
    "For graphs of TensorFlow: their names, devices, sessions and locks, and numbers that are read when a graph runs.",
    "PyTorch",
    "Keras",
    "JAX",
    "MXNet",
)
_OF_KERAS: Final = _for("For `fit` and the files of Keras.", "PyTorch", "TensorFlow", "JAX", "MXNet")
_DENSE: Final = "Gradients are dense in JAX."
_LOCAL: Final = "Give parameters of a single rank a separate optimizer, which is not distributed"
_PASSES: Final = (
    'MXNet has its own accumulation: with `grad_req="add"`, step after several batches and give `step` the number of '
    "all their samples."
)

# A name, or an option as `name(option)`, by patterns of fnmatch; the first that knows the framework counts.
REASONS: Final[dict[str, dict[str, str]]] = {
    "sparse_allreduce_async": {
        "Keras": "The optimizer reduces sparse gradients itself.",
        "JAX": _DENSE,
    },
    "*_async": _HANDLES,
    "*_async_": _HANDLES,
    "poll": _HANDLES,
    "synchronize": _HANDLES,
    "*allreduce_": _IN_PLACE,
    "broadcast_": {"JAX": _IN_PLACE["JAX"]},
    "grouped_*": _OF_THE_BACKEND,
    "alltoall": _OF_THE_BACKEND,
    "join": _OF_THE_BACKEND,
    "*(process_set)": _OF_THE_BACKEND,
    "reducescatter(*scale_factor)": _OF_THE_BACKEND,
    "reducescatter(compression)": _OF_THE_BACKEND,
    "broadcast_optimizer_state": {
        "MXNet": "The first step makes the state, from zeros, so it is the same on all ranks. Load a saved state on "
        "every rank, or make it part of an `elastic.MXNetState`.",
    },
    "broadcast_optimizer_state(model)": {
        "JAX": "PyTorch's state is made from the model when it is empty; an Optax state never is.",
    },
    "DistributedGradientTape": _for(
        "The optimizer reduces the gradients; you wrap nothing else.", "PyTorch", "Keras", "MXNet"
    ),
    "PartialDistributedOptimizer": {
        "PyTorch": f"{_LOCAL}.",
        "MXNet": f"{_LOCAL}.",
        "JAX": f"{_LOCAL}, by `optax.multi_transform`.",
    },
    "HorovodInternalError": _for(
        "Operations raise TensorFlow's errors, with Horovod's message and its code. The class is in "
        "`horovod.common.exceptions`.",
        "TensorFlow",
        "Keras",
    ),
    "check_num_rank_power_of_2": _for(
        "A name of earlier releases. The function is `horovod.common.util.num_rank_is_power_2`.",
        "PyTorch",
        "Keras",
        "JAX",
        "MXNet",
    ),
    "*_op": _OF_GRAPHS,
    "load_model": _OF_KERAS,
    "callbacks.*": _OF_KERAS,
    "elastic.*Callback": _OF_KERAS,
    "elastic.ElasticSampler": _for(
        "A sampler for PyTorch's DataLoader. In other frameworks, split the data again in a callback of "
        "`state.register_reset_callbacks`, by `hvd.rank()` and `hvd.size()`.",
        "TensorFlow",
        "Keras",
        "JAX",
        "MXNet",
    ),
    "*(ignore_name_scope)": _OF_GRAPHS,
    "*(device_dense)": _OF_GRAPHS,
    "*(device_sparse)": _OF_GRAPHS,
    "*(session)": _OF_GRAPHS,
    "*(use_locking)": _OF_GRAPHS,
    "DistributedOptimizer(name)": _for(_OF_GRAPHS["JAX"], "PyTorch", "JAX", "MXNet"),
    "*(priority)": _for("An option of MXNet, without effect there.", "PyTorch", "TensorFlow", "Keras", "JAX"),
    "join(device)": {"TensorFlow": "The device of the operation is used."},
    "DistributedOptimizer(average_aggregated_gradients)": {
        "PyTorch": "Divide the loss by the number of passes, as in PyTorch without Horovod.",
        "MXNet": _PASSES,
    },
    "DistributedOptimizer(backward_passes_per_step)": {"MXNet": _PASSES},
    "DistributedOptimizer(named_parameters)": _for(
        "Only PyTorch's parameters do not know their names.", "TensorFlow", "Keras", "JAX", "MXNet"
    ),
    "DistributedOptimizer(optimizer_params)": _for(
        "MXNet's trainer makes the optimizer from it.", "PyTorch", "TensorFlow", "Keras", "JAX"
    ),
    "*(prefix)": _for(
        "Operations are named by the parameters' names, or numbered.", "PyTorch", "TensorFlow", "Keras", "JAX"
    ),
    "DistributedOptimizer(scale_local_gradients)": {
        "PyTorch": f"{_LOCAL}.",
        "MXNet": f"{_LOCAL}.",
        "JAX": f"{_LOCAL}, by `optax.multi_transform`.",
    },
    "DistributedOptimizer(sparse_as_dense)": {
        "JAX": _DENSE,
        "MXNet": "A layer decides: `sparse_grad=False` makes its gradient dense.",
    },
    "DistributedOptimizer(groups)": {"MXNet": "Named `num_groups` there, as in earlier releases."},
    "*(num_groups)": {"JAX": "The former name of `groups`."},
}
