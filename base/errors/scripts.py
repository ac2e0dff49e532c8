"""Codes that a training script meets: operations, what frameworks add, data sets and their stores, the engine."""

from __future__ import annotations

from .code import ErrorCode


class OperationCode(ErrorCode):
    """A collective operation failed, or a call of one is wrong."""

    MISMATCHED = (
        "mismatched-operations",
        "Ranks called one operation with different types, shapes, dtypes, devices or options. Make the calls equal.",
    )
    CALL_SITES_DIFFER = (
        "call-sites-differ",
        "Ranks call an unnamed operation from different lines (HOROVOD_CHECK_CALL_SITES). Make the same calls on all.",
    )
    DEADLOCK = (
        "deadlock",
        "Ranks wait for each other in different operations. Call the same operations in the same order on all ranks.",
    )
    PEER_LOST = (
        "peer-lost",
        "A rank ended or is unreachable. Elastic training restores the last commit and continues.",
    )
    SHUT_DOWN = ("shut-down", "A rank called hvd.shutdown() or ended while another rank still needed it.")
    INVALID = (
        "invalid-operation",
        "A call has invalid arguments (tensors, root or reduction). Correct the call.",
    )
    NOT_WITH_JOIN = (
        "not-with-join",
        "While a rank is in hvd.join(), only allreduce runs in the global process set. Call other operations before.",
    )
    STALLED = (
        "stalled",
        "Ranks waited longer than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS. Check the ranks that the message lists.",
    )
    TOO_MANY = (
        "too-many-operations",
        "A rank has more unfinished or new operations than the coordinator holds. Use the same names in each step.",
    )
    CONTRADICTION = (
        "contradiction",
        "A rank's message contradicts the state of its world. Register the same process sets in one order everywhere.",
    )

    # Codes of a tensor or an object that no rank can send.
    NOT_A_TENSOR = (
        "not-a-tensor",
        "The argument is not a tensor of the framework. Convert it, or send it with broadcast_object.",
    )
    UNSUPPORTED_DTYPE = ("unsupported-dtype", "Tensors of this data type can't be sent. Convert the tensor first.")
    UNSUPPORTED_LAYOUT = (
        "unsupported-layout",
        "The call takes tensors of another layout, dense or sparse. Convert the tensor, or use the other call.",
    )
    UNSUPPORTED_DEVICE = (
        "unsupported-device",
        "Tensors on this device can't be sent. Move the tensor to the CPU, or provide what the message names.",
    )
    OVERLAPPING = (
        "overlapping-elements",
        "A result can't be written to a tensor whose elements overlap in memory. Call .contiguous().",
    )
    SEVERAL_DEVICES = ("several-devices", "Tensors of one grouped call are on different devices. Move them to one.")
    NO_ROWS = ("no-rows", "A scalar has no rows to gather, scatter or exchange. Give it a dimension, or use allreduce.")
    UNPICKLABLE = (
        "unpicklable-object",
        "A Python object can't be sent because pickle refuses it. Send its contents, such as a state_dict.",
    )

    # Codes of a wrong argument: the reduction, the root, the splits, the process set.
    UNKNOWN_REDUCTION = (
        "unknown-reduction",
        "`op` is not a reduction of Horovod. Use hvd.Average, hvd.Sum or another one.",
    )
    UNDEFINED_REDUCTION = (
        "undefined-reduction",
        "This reduction does not exist for this operation, data type or process set. Use hvd.Average or hvd.Sum.",
    )
    INVALID_ROOT = ("invalid-root", "`root_rank` is not the global rank of a process in the process set.")
    WRONG_SPLITS = ("wrong-splits", "The splits of an alltoall don't fit its tensor and the number of ranks.")
    NO_SUCH_SET = (
        "no-such-process-set",
        "The process set is not registered, or was removed. Add it on all ranks first.",
    )
    NOT_IN_SET = ("not-in-process-set", "A rank called an operation in a process set to which it does not belong.")
    CLEARED_HANDLE = ("cleared-handle", "The result of the handle was taken already. Synchronize each handle once.")
    NOT_COMPILABLE = (
        "not-compilable",
        "XLA, vectorized_map or vmap can't compile this call. Use static shapes, or call it outside of them.",
    )
    WRONG_TENSOR = (
        "wrong-tensor",
        "A tensor can't be sent: its memory, data type or device, or that of its result, is not suitable.",
    )
    MOVED_TENSOR = (
        "moved-tensor",
        "A tensor lost its memory while an operation used it. Don't change tensors before synchronize() returns.",
    )
    WRONG_GPU = (
        "wrong-gpu",
        "A rank can use only one GPU. Choose it before you create tensors, and pass it to hvd.join(device).",
    )
    GRAPH_CAPTURE = (
        "graph-capture",
        "An operation of Horovod can't be in a CUDA graph. End the capture first, and call it after each replay.",
    )
    NAME_IN_FLIGHT = (
        "name-in-flight",
        "An operation with this name is still running. Use another name, or synchronize the first one before.",
    )
    NO_PROGRESS = (
        "no-progress",
        "A rank makes no progress in an operation that all ranks have started. It is stopped or overloaded.",
    )
    INTERRUPTED = ("interrupted", "A signal, such as Ctrl-C, interrupted a rank that waited.")


class TrainingCode(ErrorCode):
    """A call of a framework's binding is wrong, or comes at a wrong time."""

    NOT_INITIALIZED = ("not-initialized", "Call hvd.init() before this function.")
    UNCOPYABLE_STATE = (
        "uncopyable-state",
        "An attribute of an elastic state can't be copied, so it can't be saved. Keep its state_dict instead.",
    )
    INVALID_ARGUMENT = (
        "invalid-argument",
        "An argument has a wrong type or value. The message says what is expected.",
    )
    CONTRADICTORY_ARGUMENTS = ("contradictory-arguments", "Two arguments contradict each other. Change one of them.")
    INVALID_NAMES = (
        "invalid-parameter-names",
        "Parameter names are missing, duplicate or not strings. Pass model.named_parameters().",
    )
    UNKNOWN_PARAMETER = (
        "unknown-parameter",
        "A parameter was added to or replaced in the wrapped optimizer. Use add_param_group() of the distributed one.",
    )
    INVALID_GROUPS = ("invalid-groups", "`groups` must be a number or lists of parameters, each in one list at most.")
    INVALID_COMPRESSOR = (
        "invalid-compressor",
        "A GradientCompressor's `reduce` does not do what its base class documents, or a class was passed.",
    )
    INVALID_SHAPE = ("invalid-input-shape", "A layer got a batch with a shape that it can't normalize.")
    DIFFERENT_MODELS = (
        "different-models",
        "Models or optimizers have different parameters on the ranks. Build the same ones on all ranks.",
    )
    DIFFERENT_WEIGHTS = (
        "different-weights",
        "Ranks train different weights, states or options. Broadcast them from rank 0 before the first step.",
    )
    DIFFERENT_ORDER = (
        "different-order",
        "Ranks make or use models or optimizers in different orders. Use the same order on all ranks.",
    )
    DIFFERENT_STATES = (
        "different-states",
        "The elastic states of the ranks have different names or optimizers. Use the same ones on all ranks.",
    )
    SPARSE_GRADIENT = (
        "sparse-gradient",
        "A gradient is sparse, but only dense ones can be reduced here. Pass sparse_as_dense=True.",
    )
    UNSUPPORTED_OPTIMIZER = (
        "unsupported-optimizer",
        "The call does not support this kind of optimizer. Use another one.",
    )
    NOT_DISTRIBUTED = (
        "not-distributed",
        "An optimizer is not distributed, or its copy is not. Pass it to hvd.DistributedOptimizer.",
    )
    NOT_BUILT = ("model-not-built", "The model has no weights yet. Build it first, or call it with a batch.")
    GRADIENTS_IN_FLIGHT = (
        "gradients-in-flight",
        "Gradients are being reduced. Call optimizer.synchronize() or optimizer.step() first.",
    )
    UNTRUSTED_CHECKPOINT = (
        "untrusted-checkpoint",
        "A checkpoint has objects that could run code. Allow their classes in PyTorch, or start without it.",
    )
    DIFFERENT_METRICS = (
        "different-metrics",
        "Ranks have different metrics at the end of an epoch. Give all ranks the same metrics and validation data.",
    )
    REDUCED_TWICE = (
        "reduced-twice",
        "Two optimizers, or a tape and an optimizer, reduce the gradients of one parameter. Drop one of them.",
    )
    NOT_REDUCED = (
        "not-reduced",
        "The step would apply gradients that were not reduced. Let the distributed optimizer reduce them.",
    )
    DROPPED_AVERAGES = (
        "dropped-averages",
        "Gradients were averaged, then cleared before a step used them. Call zero_grad() after step().",
    )
    CHANGED_GRADIENTS = (
        "changed-gradients",
        "Gradients were changed or dropped while they were reduced. Call optimizer.synchronize() first.",
    )
    TOO_MANY_PASSES = (
        "too-many-passes",
        "There were more backward passes before a step than backward_passes_per_step. Increase it.",
    )
    MADE_SEVERAL_TIMES = (
        "gradient-made-several-times",
        "A backward pass computes a gradient again while it is reduced. Pass use_reentrant=False to checkpoint().",
    )
    ADASUM_OVERLAP = (
        "adasum-overlap",
        "backward() takes the steps, so nothing may be changed before step(). Unset HOROVOD_ADASUM_OVERLAP.",
    )
    NO_GRAPH = (
        "no-graph",
        "The call needs a TensorFlow 1 graph or session. In eager mode use broadcast_variables.",
    )
    DATA_SERVICE_UNREACHABLE = (
        "data-service-unreachable",
        "The tf.data service has ended, or the configuration is for another job. Start it, and use its file.",
    )
    DATA_SERVICE_INCOMPLETE = (
        "data-service-incomplete",
        "Processes of the tf.data service did not start in time. Start all of them, or raise the timeout.",
    )
    DATA_SERVICE_UNPROTECTED = (
        "data-service-unprotected",
        "Anybody could use a tf.data server on this host. Change what the message names, or accept it (--insecure).",
    )
    OLDER_MODEL_FILE = (
        "older-model-file",
        "Keras 3 can't load a model that Keras 2 saved. The message says how to convert the file.",
    )
    FORKED_ITERATION = ("forked-iteration", "A forked child can't continue its parent's iteration. Start a new one.")


class DataCode(ErrorCode):
    """A data set or a store can't be used, or holds something that training can't take."""

    MISSING_DATA_PACKAGE = (
        "missing-data-package",
        "A package for the data or the store is not installed on this host. Install it.",
    )
    UNREADABLE_DATA = (
        "unreadable-data",
        "A path has no Parquet files, or a file can't be read. The message says which one and why.",
    )
    MISSING_COLUMN = ("missing-column", "A column is not in the data set, or not in one of its files. Check its name.")
    UNSUPPORTED_COLUMN = (
        "unsupported-column",
        "A column has a type that can't become an array, or has text instead of numbers. Convert it first.",
    )
    NULL_VALUE = (
        "null-value",
        "A column has a row without a value. Fill or drop such rows before you write the data.",
    )
    NOT_FINITE = (
        "not-finite",
        "A training column has NaN or infinity, which would make all weights NaN. Replace or drop such rows.",
    )
    DIFFERENT_SHAPES = (
        "different-shapes",
        "Lists or vectors of one column have different sizes. Make them equal before you write the data.",
    )
    TOO_FEW_ROWS = ("too-few-rows", "There are no rows for training or validation, or fewer rows than processes.")
    NOTHING_TO_REPEAT = (
        "nothing-to-repeat",
        "An endless reader has no rows to repeat: the data set has fewer rows than there are ranks. Use fewer ranks.",
    )
    INVALID_BATCH = (
        "invalid-batch",
        "A transformation_fn failed, or did not return a batch. Return the batch that it got, changed.",
    )
    DATA_STORE_FAILED = (
        "data-store-failed",
        "A store refuses a request or does not answer. Check the bucket, the credentials, the endpoint or the disk.",
    )
    WRONG_STORE_PATH = (
        "wrong-store-path",
        "A path does not belong to this kind of store, or to the file system that the store was made for.",
    )


class EngineCode(ErrorCode):
    """The engine, the operating system, a GPU or a library refused something."""

    INTERNAL = ("internal", "An error in Horovod itself or in the operating system. Please report it.")
    OUT_OF_MEMORY = (
        "out-of-memory",
        "The host or the GPU has too little free memory for an operation. Free some, or use smaller tensors.",
    )
    TOO_MANY_OPEN_FILES = (
        "too-many-open-files",
        "This process or its host has too many open files. Raise the limit that the message names.",
    )
    SHARED_MEMORY = (
        "shared-memory",
        "Processes on one host can't share memory. Use one release and the same settings; check container limits.",
    )
    UNEXPECTED_DATA = (
        "unexpected-data",
        "A rank got unexpected data. Use one release and the same settings on all hosts; if it remains, report it.",
    )
    TAMPERED_DATA = (
        "tampered-data",
        "Data was changed on a protected connection (HOROVOD_WIRE). Check the network between the hosts.",
    )
    MISSING_LIBRARY = (
        "missing-library",
        "A library that a setting requires can't be loaded or is incomplete. Install it, or name the right file.",
    )
    NO_GPU = ("no-gpu", "The GPU does not exist, or its driver is missing or too old. Check nvidia-smi.")
    NO_NCCL = (
        "no-nccl",
        "A setting requires NCCL, which can't be used. Install it, name its file, or don't require it.",
    )
    GPU_FAILED = ("gpu-failed", "A call of the GPU's driver or compiler failed. See the kernel's log and nvidia-smi.")
    GPU_STALLED = (
        "gpu-stalled",
        "This rank's own GPU makes no progress. Check the work queued on it, the kernel's log and nvidia-smi.",
    )
    NCCL_FAILED = ("nccl-failed", "A call of NCCL failed. Set NCCL_DEBUG=INFO to see more.")
    GLOO_FAILED = ("gloo-failed", "A Gloo collective failed. Unset HOROVOD_CPU_OPERATIONS=gloo to run without Gloo.")
    TIMELINE = (
        "timeline",
        "The timeline file can't be written, or is incomplete. Check its path and its disk.",
    )
    STUCK_THREAD = (
        "stuck-thread",
        "A thread does not return from an operation. The memory that it may use is kept until the process ends.",
    )
    FORKED_CHILD = (
        "forked-child",
        "A forked child can't use its parent's world. Start the child with spawn instead of fork.",
    )
