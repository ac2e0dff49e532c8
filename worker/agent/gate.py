"""The first thing a training process runs, in place of the code that subprocess could run between fork and exec.

The gate is a pipe. This code waits for one byte on it, which comes once the guardian knows about this process. (If the
launcher dies before that, the pipe closes and the command is never started.) Then it asks the kernel for SIGTERM when
the launcher dies, in case the guardian fails; gives the signals that Python changes their defaults back; and becomes
the command by exec.

Run as a script (`python -I -S gate.py FD PID command ...`), standard library only. Python code between fork and exec
(`preexec_fn`) would do the same and may deadlock in a launcher that has threads.
"""

from __future__ import annotations

import os
import signal
import sys

NOT_EXECUTABLE = 126  # the exit codes that shells use for this
NOT_FOUND = 127
_CODE = "command-unusable"  # LaunchCode.COMMAND_UNUSABLE, which this script can't import
_PR_SET_PDEATHSIG = 1  # prctl(2); survives exec, except of set-user-id programs


def main(gate: int, launcher: int, command: list[str]) -> int:
    """Becomes the command; returns an exit code only where the command could not be started."""
    # SIGINT too: a shell that runs its launcher in the background leaves it ignored, and Ctrl-C would not arrive.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass  # the kernel does not offer it; the guardian alone must do
    if os.getppid() != launcher or os.read(gate, 1) != b"g":
        return 1
    os.close(gate)
    try:
        os.execvp(command[0], command)  # noqa: S606  (no shell is wanted)
    except OSError as error:
        print(f"{command[0]!r} cannot be started: {error.strerror}. [{_CODE}]", file=sys.stderr)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
