"""Codes of collective operations: wrong calls, ranks that disagree, peers that are lost."""

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
