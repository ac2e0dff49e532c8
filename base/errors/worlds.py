"""Codes of worlds: joining, forming, leaving, process sets."""

from .code import ErrorCode

# The exit code of a process of an elastic job whose committed state is lost: no other process can do better.
STATE_LOST_EXIT = 79


class WorldCode(ErrorCode):
    """A process can't join a world, or a world can't form."""

    JOB_RUNS_ALREADY = (
        "job-runs-already",
        "A world of this job is complete. Wait until it has ended, or give this job another name (HOROVOD_JOB).",
    )
    CHILD_OF_RANK = (
        "child-of-rank",
        "A child process of a rank can't run operations or join that rank's world. See the sentence for what to do.",
    )
    OTHER_VERSION = (
        "other-version",
        "Two processes of one job, or one and its coordinator, have different releases of Horovod. Install the same.",
    )
    INVALID_REQUEST = (
        "invalid-join-request",
        "A request to join has a name, size, address or text that no coordinator takes. The sentence names it.",
    )
    INVALID_SIZE = (
        "invalid-world-size",
        "A world can't have so many members. Correct HOROVOD_SIZE, HOROVOD_MIN_SIZE and HOROVOD_MAX_SIZE.",
    )
    INVALID_RANK = (
        "invalid-rank",
        "A rank is outside of its world, is asked for twice, or only some processes ask for one. Correct HOROVOD_RANK.",
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
        "The world went on without this process, which was stopped or out of reach for too long. It may join the next.",
    )
    JOB_DONE = ("job-done", "An elastic job has done its work while this process waited for a place. Nothing is wrong.")
    STATE_LOST = (
        "state-lost",
        "What an elastic job had committed is lost with its processes. Change HOROVOD_JOB, or --elastic-begin-anew.",
    )
    EPOCH_OVER = ("epoch-over", "The world that a member names has ended. It may join the next world.")
    UNKNOWN_WORLD = (
        "unknown-world",
        "The coordinator was restarted and can't tell who the members of this world are. Start the job again.",
    )
    UNPROVEN_MEMBER = ("unproven-member", "A process did not prove that it is the member which it says that it is.")
    INCOMPLETE_WORLD = (
        "incomplete-world",
        "Not all processes came in time. Start the missing ones, or give them more time with HOROVOD_START_TIMEOUT.",
    )
    COORDINATOR_UNREACHABLE = (
        "coordinator-unreachable",
        "No coordinator answers, or the connection to it broke. Check its address, and that it runs.",
    )
    COORDINATOR_REFUSED = ("coordinator-refused", "The coordinator ended a call. The sentence says why.")
    NOT_A_COORDINATOR = (
        "not-a-coordinator",
        "Another program answers where a coordinator should, or one of another version. Check HOROVOD_COORDINATOR.",
    )
    UNREACHABLE_PEER = (
        "unreachable-peer",
        "Members of a world can't connect to each other. Check firewalls and HOROVOD_NETWORK_INTERFACES.",
    )
    NO_INTERFACE = (
        "no-network-interface",
        "A host has no network interface that can be used, or not the one that HOROVOD_NETWORK_INTERFACES names.",
    )
    NO_SHARED_MEMORY = (
        "no-shared-memory",
        "HOROVOD_TRANSPORT=shm asks for memory that the ranks can't share. Use HOROVOD_TRANSPORT=auto or tcp.",
    )
    INVALID_PROCESS_SET = ("invalid-process-set", "A process set is none, or has ranks that the world does not have.")
    DUPLICATE_PROCESS_SET = ("duplicate-process-set", "A process set of these ranks exists already. Use that one.")
    PROCESS_SETS_DISAGREE = (
        "process-sets-disagree",
        "Ranks add or remove different process sets. Let all ranks do the same in the same order.",
    )
    PROCESS_SET_IN_USE = (
        "process-set-in-use",
        "A process set can't be removed while operations run in it. Synchronize their handles first.",
    )
    STATIC_PROCESS_SETS = (
        "static-process-sets",
        "Process sets can't be added or removed in this world. Set HOROVOD_DYNAMIC_PROCESS_SETS=1 on all ranks.",
    )
    NOT_CONNECTED = (
        "not-connected",
        "A member could not connect to its peers and left the world before it stood. See the error of that process.",
    )
