"""Codes of what frameworks add: optimizers, gradients, states, callbacks."""

from .code import ErrorCode


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
    FORKED_ITERATION = ("forked-iteration", "A forked child can't go on with its parent's iteration. Begin a new one.")
