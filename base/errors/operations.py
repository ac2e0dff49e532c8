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
