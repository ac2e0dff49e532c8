"""Codes of what brings a job about: settings, who may speak to whom, worlds, launchers, clusters."""

from __future__ import annotations

from .code import ErrorCode


class SettingCode(ErrorCode):
    """A setting has a value that it can't have."""

    INVALID_SETTING = ("invalid-setting", "A variable, an option or a key has a value that it cannot have.")
    UNKNOWN_SETTING = ("unknown-setting", "There is no such setting. docs/settings.md lists all of them.")
    MISSING_SETTING = ("missing-setting", "A required setting is not given. The message names it.")
    CONFLICTING_SETTINGS = (
        "conflicting-settings",
        "Two settings contradict each other, though each one alone is valid. Remove one of them.",
    )
    UNSUPPORTED = (
        "unsupported",
        "This installation of Horovod does not support what a setting or an argument asks for.",
    )
    UNUSABLE_FILE = (
        "unusable-file",
        "A file that a setting names can't be read or written. Check its name and its permissions.",
    )
    INVALID_HOSTS = (
        "invalid-hosts",
        "A list or file of hosts and slots has a wrong format. The message names the entry.",
    )
    TOO_FEW_SLOTS = ("too-few-slots", "The job asks for more processes than the hosts have slots.")
    LAUNCHER_VARIABLES = (
        "launcher-variables",
        "Variables of another launcher are incomplete or not for this process. HOROVOD_CLUSTER=none ignores them.",
    )


class AccessCode(ErrorCode):
    """A process is refused, or refuses its peer."""

    WRONG_TOKEN = ("wrong-token", "The tokens of the two sides differ. Give both the same file (HOROVOD_TOKEN_FILE).")
    UNUSABLE_TOKEN = (
        "unusable-token",
        "A token file can't be read, or holds no token. A token is one line of ASCII text.",
    )
    WEAK_TOKEN = ("weak-token", "A token is so short that it could be guessed. Make one with `openssl rand -hex 32`.")
    NOT_PRIVATE = ("not-private", "Another user could have written a file that must be private. Remove it.")
    OTHER_USER = (
        "other-user",
        "Another user's process listens at the address of this process's coordinator. Choose another port, or use TLS.",
    )
    UNPROVEN = (
        "token-not-proven",
        "The process that answers as rank 0 does not know this process's token. Give all ranks the same token.",
    )
    UNKNOWN_OWNER = (
        "unknown-owner",
        "The owner of the process that listens on an address can't be determined. Use TLS.",
    )
    UNUSABLE_CERTIFICATE = (
        "unusable-certificate",
        "A certificate, key or authority file can't be read or used, or certificate and key do not belong together.",
    )
    UNTRUSTED_CERTIFICATE = (
        "untrusted-certificate",
        "The other side's certificate has expired, is for another name, or is signed by an unknown authority.",
    )
    REFUSED_CERTIFICATE = (
        "refused-certificate",
        "The other side requires a certificate, or rejected the one that this side sent.",
    )
    TLS_ON_ONE_SIDE = (
        "tls-on-one-side",
        "Only one side uses TLS. Set HOROVOD_TLS_CA if the coordinator has a certificate, and unset it if not.",
    )
    TLS_HANDSHAKE = ("tls-handshake", "A TLS handshake failed. Check the files of both sides.")
    OTHER_JOB = (
        "token-of-another-job",
        "The token is for another job. Use the token of this job, or that of the cluster.",
    )
    EXPOSED = (
        "exposed",
        "Anybody on other hosts could use a port. Require a token or certificates, or accept the risk (--insecure).",
    )
    OTHER_HOST_NAME = (
        "other-host-name",
        "A request for a page on loopback names another host, as a foreign web page might do. Use localhost.",
    )
    TOKEN_NOT_KEPT = (
        "token-not-kept",
        "A coordinator can't store its token for the processes of its user. Give both sides a token file.",
    )


# The exit code of a process of an elastic job whose committed state is lost: no other process can do better.
STATE_LOST_EXIT = 79


class WorldCode(ErrorCode):
    """A process can't join a world, or a world can't form."""

    JOB_RUNS_ALREADY = (
        "job-runs-already",
        "A job with this name runs already. Wait until it ends, or choose another name (HOROVOD_JOB).",
    )
    CHILD_OF_RANK = (
        "child-of-rank",
        "A child process of a rank can't run operations or join that rank's world. The message says what to do.",
    )
    OTHER_VERSION = (
        "other-version",
        "Processes of one job have different releases of Horovod, or their coordinator has one that can't serve them.",
    )
    INVALID_REQUEST = (
        "invalid-join-request",
        "A request to join has an invalid name, size, address or text. The message names it.",
    )
    INVALID_SIZE = (
        "invalid-world-size",
        "A world can't have this size. Correct HOROVOD_SIZE, HOROVOD_MIN_SIZE and HOROVOD_MAX_SIZE.",
    )
    INVALID_RANK = (
        "invalid-rank",
        "HOROVOD_RANK is not below HOROVOD_SIZE, is the same in two processes, or is set in some processes only.",
    )
    MEMBERS_DISAGREE = (
        "members-disagree",
        "Processes of one job have different sizes or settings. Start all of them with the same.",
    )
    TOO_MANY_MEMBERS = (
        "too-many-members",
        "All processes of the job have joined already. Start only HOROVOD_SIZE processes, or use another HOROVOD_JOB.",
    )
    WORLD_TOO_LARGE = (
        "world-too-large",
        "The addresses and options of a world exceed a message or an entry of the store. Use fewer interfaces.",
    )
    MEMBER_ID_IN_USE = ("member-id-in-use", "Two attempts to join have the same id. Start the process again.")
    REPLACED = ("replaced", "Another process has replaced this one, which has to end.")
    DECLARED_LOST = (
        "declared-lost",
        "The others went on without this process, as it was stopped or unreachable for too long. It may join again.",
    )
    JOB_DONE = ("job-done", "The elastic job finished while this process waited for a place. Nothing is wrong.")
    STATE_LOST = (
        "state-lost",
        "An elastic job lost all processes that held its committed state. Start a new job, or --elastic-begin-anew.",
    )
    EPOCH_OVER = ("epoch-over", "The world to which a process belongs has ended. The process may join the next one.")
    UNKNOWN_WORLD = (
        "unknown-world",
        "The coordinator was restarted and no longer knows the processes of this world. Start the job again.",
    )
    UNPROVEN_MEMBER = (
        "unproven-member",
        "A process claims a place in a world, but could not prove that the place is its own.",
    )
    INCOMPLETE_WORLD = (
        "incomplete-world",
        "Some processes did not join in time. Start them, or raise HOROVOD_START_TIMEOUT.",
    )
    COORDINATOR_UNREACHABLE = (
        "coordinator-unreachable",
        "No coordinator answers, or the connection to it broke. Check its address, and whether it runs.",
    )
    COORDINATOR_REFUSED = ("coordinator-refused", "The coordinator ended a call. The message says why.")
    NOT_A_COORDINATOR = (
        "not-a-coordinator",
        "The address belongs to another program, or to a coordinator of another version. Check HOROVOD_COORDINATOR.",
    )
    UNREACHABLE_PEER = (
        "unreachable-peer",
        "Ranks of a world can't connect to each other. Check firewalls and HOROVOD_NETWORK_INTERFACES.",
    )
    NO_INTERFACE = (
        "no-network-interface",
        "A host has no usable network interface, or lacks the one that HOROVOD_NETWORK_INTERFACES names.",
    )
    NO_SHARED_MEMORY = (
        "no-shared-memory",
        "HOROVOD_TRANSPORT=shm is set, but the ranks can't share memory. Use HOROVOD_TRANSPORT=auto or tcp.",
    )
    INVALID_PROCESS_SET = (
        "invalid-process-set",
        "A process set is empty or invalid, or has ranks that the world does not have.",
    )
    DUPLICATE_PROCESS_SET = ("duplicate-process-set", "A process set with these ranks exists already. Use that one.")
    PROCESS_SETS_DISAGREE = (
        "process-sets-disagree",
        "Ranks add or remove different process sets. Make the same calls in the same order on all ranks.",
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
        "A process could not connect to its peers and left before the world began. See the error of that process.",
    )


class LaunchCode(ErrorCode):
    """A launcher can't start, or the processes that it started failed."""

    WRONG_COMMAND_LINE = (
        "wrong-command-line",
        "The command line has an unknown or a missing argument. --help shows all of them.",
    )
    CONFLICTING_OPTIONS = (
        "conflicting-options",
        "Options or arguments contradict each other, or one requires another. Remove or change one.",
    )
    UNSUPPORTED_OPTION = (
        "unsupported-option",
        "An option or argument is for something that Horovod lacks, such as MPI. The message says what to use instead.",
    )
    WRONG_CONFIG_FILE = (
        "wrong-config-file",
        "The file of --config-file can't be read, or has an entry that is not a setting.",
    )
    OLDER_SCRIPT = (
        "older-script",
        "`horovodrun --check` found code that fails or behaves differently now. The message says what to write.",
    )
    SCRIPT_UNREADABLE = (
        "script-unreadable",
        "`horovodrun --check` can't read a file, or the file is not Python 3 source.",
    )
    COMMAND_UNUSABLE = (
        "command-unusable",
        "The program does not exist or is not executable. Give its path, or put its interpreter before it.",
    )
    PROGRAM_ON_STDIN = (
        "program-on-stdin",
        "The command reads its program from stdin, which not all ranks can read. Put the program into a file.",
    )
    PROCESS_NOT_STARTED = (
        "process-not-started",
        "The operating system refuses to start a process: a limit is reached, or the current directory is gone.",
    )
    FAILED_AT_START = (
        "failed-at-start",
        "Every process of an elastic job failed before hvd.init(), and a new one would too. See the error it printed.",
    )
    TOO_FEW_GPUS = (
        "too-few-gpus",
        "A host has fewer GPUs than processes, and each process needs one. Start fewer, or omit --pin-gpus.",
    )
    TOO_FEW_RESOURCES = (
        "too-few-resources",
        "Ray or Spark could not place the processes in time. The message names resources that are missing or in use.",
    )
    WORKERS_NOT_STARTED = (
        "workers-not-started",
        "A method of RayExecutor was called before start() or after shutdown(), or start() was called twice.",
    )
    WORKERS_LATE = (
        "workers-late",
        "Ray placed the workers, but their processes did not answer in time. Look at Ray's logs.",
    )
    OUTPUT_UNUSABLE = (
        "output-unusable",
        "The ranks' output can't be written: a folder is unusable, or the reader of stdout or stderr is gone.",
    )
    MISSING_PROGRAM = (
        "missing-program",
        "A program or a package that the launcher needs is not installed on this host. Install it.",
    )
    UNKNOWN_HOST = (
        "unknown-host",
        "The host name has no address, or the host does not answer. Check the name and the network.",
    )
    SSH_HOST_KEY = (
        "ssh-host-key",
        "The key of a host is unknown to ssh, or has changed. Verify it, then add it to known_hosts or replace it.",
    )
    SSH_LOGIN_REFUSED = (
        "ssh-login-refused",
        "ssh could not log in to a host. It must work without a password; -i names another key.",
    )
    HOST_INSTALLATION = (
        "host-installation",
        "A host has no Python, no Horovod, or another version of Horovod. Install the same version on all hosts.",
    )
    NO_AGENT_ON_HOST = (
        "no-agent-on-host",
        "The agent of a host did not start or register. The message has the output of the agent or of ssh.",
    )
    RANK_FAILED = (
        "rank-failed",
        "A process of the job failed, was lost or left no result. See its output.",
    )
    JOB_CANCELLED = (
        "job-cancelled",
        "The Spark job was cancelled (on Spark's page or by its job group), or the SparkContext or its JVM ended.",
    )
    FUNCTION_RAISED = (
        "function-raised",
        "The function of horovod.run, horovod.spark.run or an executor raised an exception, whose traceback is shown.",
    )
    DISCOVERY_FAILED = (
        "discovery-failed",
        "Host discovery of an elastic job fails, hangs or finds too few hosts. Run the script by hand to see why.",
    )
    RESET_LIMIT = (
        "reset-limit",
        "An elastic job changed as often as --reset-limit allows. See its processes' output, or raise the limit.",
    )
    CERTIFICATE_FILES = (
        "certificate-files",
        "`horovodrun certs` can't read, write or renew a file, or would overwrite one.",
    )


class ClusterCode(ErrorCode):
    """A cluster of agents can't run a job, or can't answer."""

    UNKNOWN_JOB = ("unknown-job", "The cluster has no job with this id. `horovodrun ps` lists its jobs.")

    # Codes of what launchers say.
    NO_COORDINATOR_NAMED = (
        "no-coordinator-named",
        "No coordinator was given. Name it with --coordinator or in HOROVOD_COORDINATOR.",
    )
    CLUSTER_SILENT = (
        "cluster-silent",
        "No coordinator of the cluster answers. The request may have been done nevertheless: see `horovodrun ps`.",
    )
    CLUSTER_REFUSES = ("cluster-refuses", "The coordinator refused the request. The message says why.")
    JOB_NOT_OVER = ("job-not-over", "The job still ran at the end of the --timeout of `horovodrun wait`.")

    # Codes of job files and of the code that they name.
    WRONG_JOB_FILE = (
        "wrong-job-file",
        "The job file can't be read, or has errors in the lines that the message names. See docs/jobs.md.",
    )
    CODE_NOT_PACKED = (
        "code-not-packed",
        "The folder with the job's code does not exist, or has an entry that can't be sent to other hosts.",
    )
    CODE_TOO_LARGE = (
        "code-too-large",
        "The folder with the job's code is too large to send. Exclude data and the like in .horovodignore.",
    )
    CODE_NOT_HERE = (
        "code-not-here",
        "The coordinator does not have the code of a job (any more). Submit the job again.",
    )
    CODE_DAMAGED = (
        "code-damaged",
        "The code arrived damaged at a host, or has an entry that an agent refuses to unpack.",
    )

    # Agents.
    NO_PYTHON_ENVIRONMENT = (
        "no-python-environment",
        "A host does not have the Python environment that the job file names. Install it there, or name another one.",
    )
    AGENT_RUNS_ALREADY = (
        "agent-runs-already",
        "Another agent uses the same folder. Give each agent of a host its own name or folder.",
    )
    RELAY_REFUSED = (
        "relay-refused",
        "An agent can't relay a call of its ranks to the coordinator. HOROVOD_RELAY=0 turns the relay off.",
    )

    # Codes with which coordinators refuse.
    INVALID_JOB = (
        "invalid-job",
        "The description of a job lacks something or contradicts itself. Correct it, and submit the job again.",
    )
    JOB_TOO_LARGE = (
        "job-too-large",
        "The record of a job is too large for the store. Shorten its environment, command or list of hosts.",
    )
    NO_ROOM_FOR_CODE = (
        "no-room-for-code",
        "There is no space for the job's code next to that of unfinished jobs. Submit it again when some have ended.",
    )
    HOSTS_UNREACHABLE = (
        "hosts-unreachable",
        "The hosts of a job can't reach each other. Check routes and firewalls, or choose other hosts.",
    )
    TOO_FEW_PROCESSES = (
        "too-few-processes",
        "Processes of a job were lost, and no slots were free for new ones. Add hosts, or lower the job's minimum.",
    )
    AGENT_VERSION = (
        "agent-version",
        "An agent and the coordinator have releases that do not understand each other. Install the same on both.",
    )
    LAUNCHER_VERSION = (
        "launcher-version",
        "A launcher and the coordinator have releases that do not understand each other. Install the same on both.",
    )
    AGENT_NAME_TAKEN = (
        "agent-name-taken",
        "Another agent has registered with this name. Give this one another --name, or wait until the other is gone.",
    )
    WRONG_MESSAGE = (
        "wrong-message",
        "A coordinator got an invalid message. Another program uses its port, or releases differ.",
    )
    TOO_MANY_MESSAGES = (
        "too-many-messages",
        "A process sends more messages than any training needs, or does not read those sent to it.",
    )
    NOT_SERVED_HERE = (
        "not-served-here",
        "Another coordinator of the store serves this job, or will soon. Processes find it automatically.",
    )
    NEWER_STREAM = ("newer-stream", "A process reconnected, so its earlier connection ends.")
    COORDINATOR_ENDS = ("coordinator-ends", "The coordinator was told to stop. Another one may continue its jobs.")
    NOT_RUNNING = (
        "coordinator-not-running",
        "A program uses an embedded coordinator before start(), or starts it twice.",
    )
    PORT_IN_USE = ("port-in-use", "Another program listens on the port. Stop it, or choose another port.")
    CANNOT_LISTEN = (
        "cannot-listen",
        "A coordinator can't listen on its address: the host lacks it or forbids it. Choose another address.",
    )

    # The store.
    STORE_FAILED = (
        "store-failed",
        "The store can't be reached, or fails. Coordinators continue when it answers again.",
    )
    STORE_TAKES_NO_WRITES = (
        "store-takes-no-writes",
        "The store has no space left, or is read-only. Coordinators continue when it accepts writes again.",
    )
    STORE_WRITE_UNSURE = (
        "store-write-unsure",
        "The answer to a write was lost, so it may or may not have happened. Check before you repeat it.",
    )
    TOO_LARGE_FOR_STORE = ("too-large-for-store", "A value is too large for the store.")
    STORE_UNUSABLE = ("store-unusable", "The file of the store can't be used. Check its permissions and its disk.")
    STORE_IN_USE = (
        "store-in-use",
        "Another coordinator uses the file of the store. Several coordinators need etcd.",
    )
    STORE_DAMAGED = (
        "store-damaged",
        "The file of the store is damaged, or is not a store. Restore a backup, or start with an empty store.",
    )
    STORE_FOREIGN = (
        "store-of-another-program",
        "Another program, or another release of Horovod, has written the file. Choose another file for the store.",
    )
    STORE_FORMAT = (
        "store-of-another-release",
        "Another release of Horovod has written to the store in a format that this one lacks. Choose another store.",
    )
    STORE_KEY = (
        "store-key",
        "The store is encrypted with a key that this coordinator lacks, or has entries that are not encrypted.",
    )
    STORE_TAMPERED = (
        "store-tampered",
        "An entry of the store was not written by a coordinator and is ignored. Check who may write to the store.",
    )
