"""Codes of clusters: agents, queued jobs, job files, coordinators and their store."""

from .code import ErrorCode


class ClusterCode(ErrorCode):
    """A cluster of agents can't run a job, or can't answer."""

    UNKNOWN_JOB = ("unknown-job", "The cluster has no such job. `horovodrun ps` lists those that it has.")

    # Codes of what launchers say.
    NO_COORDINATOR_NAMED = (
        "no-coordinator-named",
        "Nothing says where the coordinators are. Name them with --coordinator or in HOROVOD_COORDINATOR.",
    )
    CLUSTER_SILENT = (
        "cluster-silent",
        "No coordinator of the cluster answers. What was asked for may have been done: see `horovodrun ps`.",
    )
    CLUSTER_REFUSES = ("cluster-refuses", "The coordinator refuses what was asked for. The sentence says why.")
    JOB_NOT_OVER = ("job-not-over", "The job is not over after the time that `horovodrun wait` was to wait.")

    # Codes of job files and of the code that they name.
    WRONG_JOB_FILE = (
        "wrong-job-file",
        "The job file can't be read, or has mistakes in the lines that are named. docs/jobs.md lists what it may say.",
    )
    CODE_NOT_PACKED = (
        "code-not-packed",
        "The folder with the code of a job holds what can't be sent to other hosts, or is not there.",
    )
    CODE_TOO_LARGE = (
        "code-too-large",
        "The code of a job is too large to be sent. Name in .horovodignore what is no code.",
    )
    CODE_NOT_HERE = (
        "code-not-here",
        "The coordinator does not have the code of a job, or not any more. Submit the job again.",
    )
    CODE_DAMAGED = (
        "code-damaged",
        "The code that came to a host is not what was sent, or holds what an agent does not unpack.",
    )

    # Agents.
    NO_PYTHON_ENVIRONMENT = (
        "no-python-environment",
        "A host does not have the Python environment that the job file names. Install it there, or name another one.",
    )
    AGENT_RUNS_ALREADY = (
        "agent-runs-already",
        "Another agent uses the same folder. Give each agent of a host a name or a folder of its own.",
    )
    RELAY_REFUSED = (
        "relay-refused",
        "An agent can't pass on a call of its ranks to their coordinator. HOROVOD_RELAY=0 does without the relay.",
    )

    # Codes with which coordinators refuse.
    INVALID_JOB = (
        "invalid-job",
        "The description of a job lacks something or contradicts itself. Correct it, and submit the job again.",
    )
    JOB_TOO_LARGE = (
        "job-too-large",
        "The record of a job would be longer than a store takes. Shorten its environment, command or list of hosts.",
    )
    NO_ROOM_FOR_CODE = (
        "no-room-for-code",
        "Jobs that are not over need all the code that coordinators keep. Submit the job again when some have ended.",
    )
    HOSTS_UNREACHABLE = (
        "hosts-unreachable",
        "The hosts of a job do not reach each other. Look at routes and firewalls, or choose other hosts.",
    )
    TOO_FEW_PROCESSES = (
        "too-few-processes",
        "Processes of a job were lost, and there was no room for others. Add hosts, or let the job do with fewer.",
    )
    AGENT_VERSION = (
        "agent-version",
        "An agent and the coordinator have different releases of Horovod. Install the same on both.",
    )
    AGENT_NAME_TAKEN = (
        "agent-name-taken",
        "Another agent has registered with this name. Give each a --name of its own, or wait until the other is gone.",
    )
    WRONG_MESSAGE = (
        "wrong-message",
        "A coordinator can't make sense of a message. Something else speaks to its port, or releases differ.",
    )
    TOO_MANY_MESSAGES = (
        "too-many-messages",
        "A process sends more than any training needs, or does not read what it is sent.",
    )
    NOT_SERVED_HERE = (
        "not-served-here",
        "Another coordinator of the store serves, or one is about to. Processes find it by themselves.",
    )
    NEWER_STREAM = ("newer-stream", "A process has connected anew, and its connection from before ends.")
    COORDINATOR_ENDS = ("coordinator-ends", "The coordinator was told to stop. Another one may go on with its jobs.")
    NOT_RUNNING = (
        "coordinator-not-running",
        "A program asks a coordinator in its process for something before start(), or starts it twice.",
    )
    PORT_IN_USE = ("port-in-use", "Another program listens on the port. Stop it, or choose another port.")
    CANNOT_LISTEN = (
        "cannot-listen",
        "A coordinator can't listen on its address: this host does not have it, or does not permit it. Choose another.",
    )

    # The store.
    STORE_FAILED = (
        "store-failed",
        "The store can't be reached, or does not do what it should. Coordinators go on when it answers again.",
    )
    STORE_TAKES_NO_WRITES = (
        "store-takes-no-writes",
        "The store has no space left, or may only be read. Coordinators go on when it takes writes again.",
    )
    STORE_WRITE_UNSURE = (
        "store-write-unsure",
        "The answer to a write was lost, so that it may have happened or not. Look before it is made again.",
    )
    TOO_LARGE_FOR_STORE = ("too-large-for-store", "A value is longer than a store takes.")
    STORE_UNUSABLE = ("store-unusable", "The file of a store can't be used. See to its permissions and to its disk.")
    STORE_IN_USE = (
        "store-in-use",
        "Another coordinator uses the file of the store, which is for one of them. Several need etcd.",
    )
    STORE_DAMAGED = (
        "store-damaged",
        "The file of a store is damaged, or is no store. Restore it from a backup, or begin with an empty one.",
    )
    STORE_FOREIGN = (
        "store-of-another-program",
        "Another program, or another release of Horovod, has written the file. Give the store a file of its own.",
    )
    STORE_KEY = (
        "store-key",
        "The store is sealed with a key that this coordinator does not have, or holds what was not sealed.",
    )
    STORE_TAMPERED = (
        "store-tampered",
        "Somebody who is no coordinator has written to the store. That entry counts as not there; see who may write.",
    )
