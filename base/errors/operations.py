"""Codes of collective operations: wrong calls, ranks that disagree, peers that are lost."""

from .code import ErrorCode


class OperationCode(ErrorCode):
    """A collective operation failed, or a call of one is wrong."""

    MISMATCHED = (
        "mismatched-operations",
        "Ranks announced one name with different types, shapes, data types, devices or options. Make the calls alike.",
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
    NOT_A_MEMBER = ("not-a-member", "A rank called an operation of a process set to which it does not belong.")
    NO_SUCH_SET = (
        "no-such-process-set",
        "The process set is not registered, or was removed. Add it on all ranks first.",
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
