"""Codes of worlds: joining, forming, leaving, process sets."""

from .code import ErrorCode


class WorldCode(ErrorCode):
    """A process can't join a world, or a world can't form."""

    JOB_RUNS_ALREADY = (
        "job-runs-already",
        "A world of this job is complete. Wait until it has ended, or give this job another name (HOROVOD_JOB).",
    )
    OTHER_VERSION = (
        "other-version",
        "Two processes of one job, or one and its coordinator, have different releases of Horovod. Install the same.",
    )
    INVALID_REQUEST = (
        "invalid-join-request",
        "A name, an option or a text in a request to join is one that no coordinator takes. Shorten or correct it.",
    )
    INVALID_SIZE = ("invalid-world-size", "A world can't have so many members. Correct HOROVOD_SIZE.")
    INVALID_RANK = (
        "invalid-rank",
        "A rank is outside of its world, is asked for twice, or only some processes ask for one. Correct HOROVOD_RANK.",
    )
    INVALID_ADDRESS = (
        "invalid-address",
        "A member offers an address to which nobody can connect. Choose others with HOROVOD_NETWORK_INTERFACES.",
    )
    MEMBERS_DISAGREE = (
        "members-disagree",
        "Processes of one job were started with different sizes or settings. Start them all alike.",
    )
    TOO_MANY_MEMBERS = (
        "too-many-members",
        "A job has all its members already. Start no more processes than HOROVOD_SIZE, or use another HOROVOD_JOB.",
    )
    WORLD_TOO_LARGE = (
        "world-too-large",
        "What a world's members say of themselves is more than a message or the store holds. Name fewer interfaces.",
    )
    MEMBER_ID_IN_USE = ("member-id-in-use", "Two attempts to join came with one id. Start the process again.")
    REPLACED = ("replaced", "Another process was started later in the place of this one, which is to end.")
    DECLARED_LOST = (
        "declared-lost",
        "The world went on without this process, because it was out of reach for too long. It may join the next world.",
    )
    EPOCH_OVER = ("epoch-over", "The world that a member names has ended. It may join the next world.")
    UNKNOWN_WORLD = (
        "unknown-world",
        "The coordinator was restarted and can't tell who the members of this world are. Start the job again.",
    )
    NOT_A_MEMBER = ("not-a-member", "A process did not prove that it is the member which it says that it is.")
    NOT_CONNECTED = (
        "not-connected",
        "A member could not connect to its peers and left the world before it stood. See the error of that process.",
    )
