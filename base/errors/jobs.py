"""Codes of what brings a job about: settings, who may speak to whom, worlds, launchers, clusters."""

from __future__ import annotations

from .code import ErrorCode


class SettingCode(ErrorCode):
    """A setting has a value that it can't have."""

    INVALID_SETTING = ("invalid-setting", "A variable, an option or a key has a value that it cannot have.")
    UNKNOWN_SETTING = ("unknown-setting", "There is no such setting. docs/settings.md lists all of them.")
    MISSING_SETTING = ("missing-setting", "Something needs a setting that is not given. The sentence names it.")
    CONFLICTING_SETTINGS = (
        "conflicting-settings",
        "Two settings are right one by one, but contradict each other. Leave one of them out.",
    )
    UNSUPPORTED = (
        "unsupported",
        "This version of Horovod, or what is installed here, can't do what a setting or an argument asks for.",
    )
    UNUSABLE_FILE = ("unusable-file", "A file that a setting names can't be read or written. Check name and rights.")
    INVALID_HOSTS = ("invalid-hosts", "A list or a file of hosts and slots is not written as it must be.")
    TOO_FEW_SLOTS = ("too-few-slots", "More processes are asked for than the hosts have slots.")
    LAUNCHER_VARIABLES = (
        "launcher-variables",
        "Variables of another launcher are incomplete or not for this process. HOROVOD_CLUSTER=none ignores them.",
    )


class AccessCode(ErrorCode):
    """A process is refused, or refuses its peer."""

    WRONG_TOKEN = ("wrong-token", "The tokens of the two sides differ. Give both the same file (HOROVOD_TOKEN_FILE).")
    UNUSABLE_TOKEN = ("unusable-token", "A file of a token can't be read, or holds no token: one line of ASCII text.")
    WEAK_TOKEN = ("weak-token", "A token is so short that it could be found by trying. Use `openssl rand -hex 32`.")
    NOT_PRIVATE = ("not-private", "Other users could have written a file that must be its owner's alone. Remove it.")
    OTHER_USER = (
        "other-user",
        "Another user's process listens where this one looks for its coordinator. Choose another port, or use TLS.",
    )
    UNPROVEN = (
        "token-not-proven",
        "What answers in place of rank 0 does not know the token of this process. Give all ranks the same token.",
    )
    UNKNOWN_OWNER = ("unknown-owner", "It can't be told whose process listens on an address. Use TLS.")
    UNUSABLE_CERTIFICATE = (
        "unusable-certificate",
        "A file of a certificate, of its key or of an authority can't be read or used, or does not fit the other one.",
    )
    UNTRUSTED_CERTIFICATE = (
        "untrusted-certificate",
        "The other side's certificate has expired, is for another name, or no authority that is known has signed it.",
    )
    REFUSED_CERTIFICATE = (
        "refused-certificate",
        "The other side asks for a certificate, or does not take the one that it was shown.",
    )
    TLS_ON_ONE_SIDE = ("tls-on-one-side", "One side speaks TLS and the other one does not. Set HOROVOD_TLS_CA or not.")
    TLS_HANDSHAKE = ("tls-handshake", "A TLS handshake failed. Check the files of both sides.")
    OTHER_JOB = (
        "token-of-another-job",
        "The token of one job admits to that job alone. Show the token of the right job, or that of the cluster.",
    )
    EXPOSED = (
        "exposed",
        "Strangers on other hosts could use a port. Ask for a token or certificates, or accept the risk (--insecure).",
    )
    OTHER_HOST_NAME = (
        "other-host-name",
        "A request for pages on loopback names another host, as one of a foreign web page does. Use localhost.",
    )
    TOKEN_NOT_KEPT = (
        "token-not-kept",
        "A coordinator can't leave its token where processes of its user look for it. Give both a token file.",
    )


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


class LaunchCode(ErrorCode):
    """A launcher can't start, or the processes that it started failed."""

    WRONG_COMMAND_LINE = (
        "wrong-command-line",
        "The command line has something unknown in it, or lacks something. --help shows what there is.",
    )
    CONFLICTING_OPTIONS = (
        "conflicting-options",
        "Options or arguments exclude or contradict each other, or one needs another one. Leave one out, or change it.",
    )
    UNSUPPORTED_OPTION = (
        "unsupported-option",
        "An option or argument is for something that is not there, such as MPI. The sentence says what to use instead.",
    )
    WRONG_CONFIG_FILE = (
        "wrong-config-file",
        "The file of --config-file can't be read, or has something in it that is no setting.",
    )
    OLDER_SCRIPT = (
        "older-script",
        "`horovodrun --check` found code that fails, or acts otherwise than before. The sentence has the remedy.",
    )
    SCRIPT_UNREADABLE = (
        "script-unreadable",
        "`horovodrun --check` can't read a file, or it is no source of Python 3.",
    )
    COMMAND_UNUSABLE = (
        "command-unusable",
        "The program to run does not exist, or can't be executed. Give its path, or put its interpreter before it.",
    )
    PROGRAM_ON_STDIN = (
        "program-on-stdin",
        "The command reads its program from stdin, where none is or where not all ranks can read. Put it into a file.",
    )
    PROCESS_NOT_STARTED = (
        "process-not-started",
        "The operating system refuses a new process: a limit is reached, or the current directory is gone.",
    )
    FAILED_AT_START = (
        "failed-at-start",
        "Each process of an elastic job failed before hvd.init(), and would again. Look at the error that it printed.",
    )
    TOO_FEW_GPUS = (
        "too-few-gpus",
        "There are fewer GPUs than processes that are to have one each. Start fewer, or leave --pin-gpus out.",
    )
    TOO_FEW_RESOURCES = (
        "too-few-resources",
        "Ray or Spark could not place the processes in time. The sentence says which resources are missing, or in use.",
    )
    WORKERS_NOT_STARTED = (
        "workers-not-started",
        "A RayExecutor is asked for something before start() or after shutdown(), or started twice.",
    )
    WORKERS_LATE = (
        "workers-late",
        "Ray has placed workers whose processes did not answer in time. Ray's own logs say what they do.",
    )
    OUTPUT_UNUSABLE = (
        "output-unusable",
        "What ranks print can't be written: a folder can't be used, or the reader of stdout or stderr has gone.",
    )
    MISSING_PROGRAM = (
        "missing-program",
        "A program or a package that the launcher needs is not installed on this host. Install it.",
    )
    UNKNOWN_HOST = ("unknown-host", "A host has no address, or does not answer. Check the name and the network.")
    SSH_HOST_KEY = (
        "ssh-host-key",
        "ssh does not know the key of a host, or knows another one. Compare it, and take or forget it.",
    )
    SSH_LOGIN_REFUSED = (
        "ssh-login-refused",
        "A host does not let ssh in. It must work without a password; -i names another key.",
    )
    HOST_INSTALLATION = (
        "host-installation",
        "A host has no Python, no Horovod, or another version of it. Install the same on all hosts.",
    )
    NO_AGENT_ON_HOST = (
        "no-agent-on-host",
        "The agent of a host did not start or register. The sentence has what the agent or ssh has said.",
    )
    RANK_FAILED = (
        "rank-failed",
        "A process of the job failed or was lost, or left no result. What it has printed says more.",
    )
    JOB_CANCELLED = (
        "job-cancelled",
        "The Spark job was cancelled, by its page or its job group, or the SparkContext or its JVM has ended.",
    )
    FUNCTION_RAISED = (
        "function-raised",
        "The function of horovod.run, horovod.spark.run or an executor raised an exception, whose traceback is shown.",
    )
    DISCOVERY_FAILED = (
        "discovery-failed",
        "What finds the hosts of an elastic job fails, does not end, or finds too few. Run it by hand to see why.",
    )
    RESET_LIMIT = (
        "reset-limit",
        "An elastic job has changed as often as --reset-limit allows. Look at what its processes print, or raise it.",
    )
    CERTIFICATE_FILES = (
        "certificate-files",
        "`horovodrun certs` can't read, write or renew a file, or would have to overwrite one.",
    )


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
