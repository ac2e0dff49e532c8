"""Codes of launchers: hosts, commands, ssh, functions that run on other hosts."""

from .code import ErrorCode


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
