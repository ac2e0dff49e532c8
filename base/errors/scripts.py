"""Codes that a training script meets: operations, what frameworks add, data sets and their stores, the engine."""

from __future__ import annotations

from .code import ErrorCode


class OperationCode(ErrorCode):
    """A collective operation failed, or a call of one is wrong."""

    MISMATCHED = (
        "mismatched-operations",
        "Ranks announced one name with different types, shapes, data types, devices or options. Make the calls alike.",
    )
    CALL_SITES_DIFFER = (
        "call-sites-differ",
        "Ranks call unnamed operations from different lines (HOROVOD_CHECK_CALL_SITES). Call them on all ranks alike.",
    )
    DEADLOCK = (
        "deadlock",
        "Ranks wait for each other in different operations. Let all ranks call the same operations in the same order.",
    )
    PEER_LOST = ("peer-lost", "A member of the world died or is out of reach. Elastic training restores and goes on.")
    SHUT_DOWN = ("shut-down", "A rank has called shutdown() or has ended while another one still needed it.")
    INVALID = (
        "invalid-operation",
        "A call makes no sense on any rank: its tensors, root or reduction. Correct it where the operation is called.",
    )
    NOT_WITH_JOIN = (
        "not-with-join",
        "While a rank is in hvd.join(), only allreduce runs in the global process set. Call the others before.",
    )
    STALLED = (
        "stalled",
        "Ranks waited for longer than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS. See what the ranks in the list are doing.",
    )
    TOO_MANY = (
        "too-many-operations",
        "A rank has more under way than the coordinator keeps. Use names that come back in each step.",
    )
    CONTRADICTION = (
        "contradiction",
        "A rank says what cannot be true of its world. Let all ranks register the same process sets, in one order.",
    )

    # Codes of a tensor or an object that no rank can send.
    NOT_A_TENSOR = (
        "not-a-tensor",
        "A tensor of the framework was expected. Convert what you have, or send it with broadcast_object.",
    )
    UNSUPPORTED_DTYPE = ("unsupported-dtype", "Tensors of this data type can't be sent. Convert the tensor first.")
    UNSUPPORTED_LAYOUT = (
        "unsupported-layout",
        "The call takes tensors of another layout, dense or sparse. Convert the tensor, or use the other call.",
    )
    UNSUPPORTED_DEVICE = (
        "unsupported-device",
        "Tensors on this device can't be sent. Move the tensor to the CPU, or provide what the sentence names.",
    )
    OVERLAPPING = (
        "overlapping-elements",
        "A result can't be written to a tensor of which several elements have one place in memory. Call .contiguous().",
    )
    SEVERAL_DEVICES = ("several-devices", "Tensors of one grouped call are on different devices. Move them to one.")
    NO_ROWS = ("no-rows", "A scalar has no rows to gather, scatter or exchange. Give it a dimension, or use allreduce.")
    UNPICKLABLE = ("unpicklable-object", "A Python object can't be sent because pickle refuses it. Send its contents.")

    # Codes of a wrong argument: the reduction, the root, the splits, the process set.
    UNKNOWN_REDUCTION = ("unknown-reduction", "`op` is none of the reductions that Horovod has, such as hvd.Average.")
    UNDEFINED_REDUCTION = (
        "undefined-reduction",
        "This reduction does not exist for this operation, data type or process set. Use hvd.Average or hvd.Sum.",
    )
    INVALID_ROOT = ("invalid-root", "`root_rank` is not the global rank of a process that takes part.")
    WRONG_SPLITS = ("wrong-splits", "The splits of an alltoall don't fit its tensor and the number of ranks.")
    NO_SUCH_SET = (
        "no-such-process-set",
        "The process set is not registered, or was removed. Add it on all ranks first.",
    )
    NOT_IN_SET = ("not-in-process-set", "A rank called an operation of a process set to which it does not belong.")
    CLEARED_HANDLE = ("cleared-handle", "The handle has given its result already. Synchronize each handle once.")
    NOT_COMPILABLE = (
        "not-compilable",
        "XLA, vectorized_map or vmap can't take this call over. Give tensors static shapes, or do without these here.",
    )
    WRONG_TENSOR = (
        "wrong-tensor",
        "A tensor can't be sent as it is: its memory, data type or device is wrong, or that of its result.",
    )
    MOVED_TENSOR = (
        "moved-tensor",
        "A tensor lost its memory while an operation used it. Leave tensors alone until synchronize() has returned.",
    )
    WRONG_GPU = (
        "wrong-gpu",
        "A rank communicates from one GPU. Choose it before tensors are made, and name it to hvd.join(device).",
    )
    GRAPH_CAPTURE = (
        "graph-capture",
        "An operation of Horovod can't be part of a CUDA graph. End the capture before, and submit after each replay.",
    )
    NAME_IN_FLIGHT = (
        "name-in-flight",
        "An operation of this name is under way. Give each one in flight a name of its own, or synchronize it first.",
    )
    NO_PROGRESS = (
        "no-progress",
        "A rank does not go on in an operation that all have started. It is stopped or overloaded; look at its host.",
    )
    INTERRUPTED = ("interrupted", "A signal, such as Ctrl-C, ended the wait of a rank.")


class TrainingCode(ErrorCode):
    """A call of a framework's binding is wrong, or comes at a wrong time."""

    NOT_INITIALIZED = ("not-initialized", "Call hvd.init() before this function.")
    UNCOPYABLE_STATE = (
        "uncopyable-state",
        "An attribute of an elastic state can't be copied, and so not saved. Keep what can be copied, as a state_dict.",
    )
    INVALID_ARGUMENT = (
        "invalid-argument",
        "An argument has a type or a value that it can't have. The sentence says what is expected.",
    )
    CONTRADICTORY_ARGUMENTS = ("contradictory-arguments", "Two arguments do not go together. Change one of them.")
    INVALID_NAMES = (
        "invalid-parameter-names",
        "Names of parameters are not unique, not for all, or no names. Pass model.named_parameters().",
    )
    UNKNOWN_PARAMETER = (
        "unknown-parameter",
        "A parameter was added or exchanged past the distributed optimizer. Use its add_param_group().",
    )
    INVALID_GROUPS = ("invalid-groups", "`groups` must be a number or lists of parameters, each in one list at most.")
    INVALID_COMPRESSOR = (
        "invalid-compressor",
        "A GradientCompressor does not do what its base class asks of `reduce`, or was passed as a class.",
    )
    INVALID_SHAPE = ("invalid-input-shape", "A layer got a batch of a shape that it can't normalize.")
    DIFFERENT_MODELS = (
        "different-models",
        "Models or optimizers of the ranks have different parameters. Build them alike on all ranks.",
    )
    DIFFERENT_WEIGHTS = (
        "different-weights",
        "Ranks train different weights, states or options. Broadcast them from rank 0 before the first step.",
    )
    DIFFERENT_ORDER = (
        "different-order",
        "Models or optimizers were made, or are used, in another order on each rank. Use the same order on all.",
    )
    DIFFERENT_STATES = (
        "different-states",
        "The elastic states of the ranks hold different names or optimizers. Give all ranks the same ones.",
    )
    SPARSE_GRADIENT = (
        "sparse-gradient",
        "A gradient is sparse where only dense ones can be reduced. Pass sparse_as_dense=True.",
    )
    UNSUPPORTED_OPTIMIZER = ("unsupported-optimizer", "This can't be done with this kind of optimizer. Use another.")
    NOT_DISTRIBUTED = (
        "not-distributed",
        "An optimizer is not distributed, or lost that when it was copied. Pass it to hvd.DistributedOptimizer.",
    )
    NOT_BUILT = ("model-not-built", "A model has no weights yet. Build it, or call it with a batch, before that.")
    GRADIENTS_IN_FLIGHT = (
        "gradients-in-flight",
        "Gradients are being reduced. Call optimizer.synchronize() or optimizer.step() first.",
    )
    UNTRUSTED_CHECKPOINT = (
        "untrusted-checkpoint",
        "A checkpoint in a store holds objects that could run code. Allow their classes in PyTorch, or begin anew.",
    )
    DIFFERENT_METRICS = (
        "different-metrics",
        "Ranks have different metrics of an epoch. Give all of them the same metrics and validation data.",
    )
    REDUCED_TWICE = (
        "reduced-twice",
        "Two optimizers, or a tape and an optimizer, reduce the gradients of one parameter. Drop one of them.",
    )
    NOT_REDUCED = (
        "not-reduced",
        "Gradients that no call of Horovod has reduced were to be applied. Let the distributed optimizer reduce them.",
    )
    DROPPED_AVERAGES = (
        "dropped-averages",
        "Gradients were averaged and then cleared, and no step was taken with them. Call zero_grad() after step().",
    )
    CHANGED_GRADIENTS = (
        "changed-gradients",
        "Gradients were changed or dropped while they were being reduced. Call optimizer.synchronize() before that.",
    )
    TOO_MANY_PASSES = (
        "too-many-passes",
        "More backward passes were made before a step than announced. Increase backward_passes_per_step.",
    )
    MADE_SEVERAL_TIMES = (
        "gradient-made-several-times",
        "A backward pass makes a gradient again that is being reduced. Pass use_reentrant=False to checkpoint().",
    )
    ADASUM_OVERLAP = (
        "adasum-overlap",
        "Steps are taken in backward(), so the script may change nothing after it. Unset HOROVOD_ADASUM_OVERLAP.",
    )
    NO_GRAPH = (
        "no-graph",
        "The call needs a v1 graph or its session. Use broadcast_variables where TensorFlow runs eagerly.",
    )
    DATA_SERVICE_UNREACHABLE = (
        "data-service-unreachable",
        "The tf.data service has ended, or the configuration is not that of its job. Start it, and use its file.",
    )
    DATA_SERVICE_INCOMPLETE = (
        "data-service-incomplete",
        "Processes of the tf.data service did not come in time. Start all of them, or raise the timeout.",
    )
    DATA_SERVICE_UNPROTECTED = (
        "data-service-unprotected",
        "Strangers could use a tf.data server on this host. Change what the error names, or accept it (--insecure).",
    )
    OLDER_MODEL_FILE = (
        "older-model-file",
        "Keras 3 can't load a model that Keras 2 has saved. The sentence says how the file becomes one that it can.",
    )
    FORKED_ITERATION = ("forked-iteration", "A forked child can't go on with its parent's iteration. Begin a new one.")


class DataCode(ErrorCode):
    """A data set or a store can't be used, or holds something that training can't take."""

    MISSING_DATA_PACKAGE = (
        "missing-data-package",
        "A package that reads the data or reaches the store is not installed on this host. Install it.",
    )
    UNREADABLE_DATA = (
        "unreadable-data",
        "A path has no Parquet files, or a file of it can't be read. The sentence says which one, and why.",
    )
    MISSING_COLUMN = ("missing-column", "A column is not in the data set, or not in one of its files. Check its name.")
    UNSUPPORTED_COLUMN = (
        "unsupported-column",
        "A column has a type of which no array can be made, or text where a model takes numbers. Convert it before.",
    )
    NULL_VALUE = (
        "null-value",
        "A column that is read has a row without a value. Fill or drop such rows before the data is written.",
    )
    NOT_FINITE = (
        "not-finite",
        "A column to train on has NaN or an infinity, which would make all weights NaN. Replace or drop such rows.",
    )
    DIFFERENT_SHAPES = (
        "different-shapes",
        "Lists or vectors of one column have unlike sizes. Make them alike before the data is written.",
    )
    TOO_FEW_ROWS = ("too-few-rows", "There are no rows to train or to validate with, or fewer than processes.")
    NOTHING_TO_REPEAT = (
        "nothing-to-repeat",
        "An endless reader has no rows to repeat: the data set has fewer rows than there are ranks. Use fewer ranks.",
    )
    INVALID_BATCH = (
        "invalid-batch",
        "A transformation_fn failed, or returned something that is no batch. Return what it got, changed.",
    )
    DATA_STORE_FAILED = (
        "data-store-failed",
        "A store refuses a request, or does not answer. Look at the bucket, the credentials, the endpoint or the disk.",
    )
    WRONG_STORE_PATH = (
        "wrong-store-path",
        "A path does not belong to this kind of store, or to the file system that the store was made for.",
    )


class EngineCode(ErrorCode):
    """The engine, the operating system, a GPU or a library refused something."""

    INTERNAL = ("internal", "A fault of Horovod itself, or of the operating system. Please report it.")
    OUT_OF_MEMORY = (
        "out-of-memory",
        "The host or the GPU has no memory left for what an operation needs. Free some, or use smaller tensors.",
    )
    TOO_MANY_OPEN_FILES = (
        "too-many-open-files",
        "This process or its host has too many open files. Raise the limit that the sentence names.",
    )
    SHARED_MEMORY = (
        "shared-memory",
        "Processes of one host can't share memory. Use one release and the same settings; see the container's limits.",
    )
    UNEXPECTED_DATA = (
        "unexpected-data",
        "A rank sent what no other one expects. Use one release and the same settings on all hosts, else report it.",
    )
    TAMPERED_DATA = (
        "tampered-data",
        "What came over a sealed connection (HOROVOD_WIRE) is not what was sent. Look between the hosts.",
    )
    MISSING_LIBRARY = (
        "missing-library",
        "A library that a setting asks for can't be loaded, or lacks something. Install it, or name the right file.",
    )
    NO_GPU = ("no-gpu", "There is no such GPU, no driver, or one that is too old. See what nvidia-smi says.")
    NO_NCCL = ("no-nccl", "NCCL is demanded and can't be used. Install it, name its file, or don't demand it.")
    GPU_FAILED = ("gpu-failed", "A call of the GPU's driver or compiler failed. See the kernel's log and nvidia-smi.")
    GPU_STALLED = (
        "gpu-stalled",
        "This rank's own GPU stands still. See what the framework has queued there, the kernel's log and nvidia-smi.",
    )
    NCCL_FAILED = ("nccl-failed", "A call of NCCL failed. Set NCCL_DEBUG=INFO to see more.")
    GLOO_FAILED = ("gloo-failed", "A collective of Gloo failed. Without HOROVOD_CPU_OPERATIONS=gloo it isn't used.")
    TIMELINE = (
        "timeline",
        "The file of the timeline can't be written, or is not complete. Check its disk and its path.",
    )
    STUCK_THREAD = (
        "stuck-thread",
        "A thread does not come back from an operation. What it may use is kept until the process ends.",
    )
    FORKED_CHILD = ("forked-child", "A forked child can't use its parent's world. Start it anew.")
