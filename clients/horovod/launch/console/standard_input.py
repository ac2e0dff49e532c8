"""What the ranks on this host read from stdin.

    python - <<EOF      a program on stdin is what every rank runs, so each gets all of it, a copy of its own
    anything else       rank 0 has the launcher's stdin itself and the others have an empty one, as under mpirun;
                        nothing is read before rank 0 reads it, so a shell's `while read` loop keeps its lines
    a terminal          rank 0 has that too, for a debugger or a question, unless the launcher runs in the background:
                        it would take what is typed for the shell

Ranks on other hosts have an empty stdin. A program on stdin that no rank could run is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from horovod.base.errors import LaunchCode, coded

PROGRAM_LIMIT_BYTES: Final = 64 << 20
_STDIN: Final = 0
_SAID_AFTER_S: Final = 2.0
_PIECE: Final = 1 << 20

# Programs that run another one, whose name stands somewhere in their arguments.
_WRAPPERS: Final = {
    "chrt", "env", "ionice", "nice", "nohup", "numactl", "setsid", "stdbuf", "taskset", "time", "timeout"
}  # fmt: skip
_PYTHON: Final = re.compile(r"(python|pypy)\d*(\.\d+)*t?")
_SHELLS: Final = {"bash", "dash", "ksh", "sh", "zsh"}
# Options that are followed by a value, and those after which nothing is read from stdin.
_PYTHON_VALUED, _PYTHON_OTHER = "WX", "chmV?"
_SHELL_VALUED, _SHELL_OTHER = "oO", "c"
_LONG_VALUED: Final = {"--check-hash-based-pycs", "--init-file", "--rcfile"}


def reads_program(command: Sequence[str]) -> bool:
    """Whether this is an interpreter, maybe started by `env` and the like, that reads its program from stdin."""
    wrapped = os.path.basename(command[0]) in _WRAPPERS
    for index, word in enumerate(command if wrapped else command[:1]):
        name = os.path.basename(word)
        if name in _SHELLS:
            return _without_program(command[index + 1 :], _SHELL_VALUED, _SHELL_OTHER, stdin="s")
        if _PYTHON.fullmatch(name):
            return _without_program(command[index + 1 :], _PYTHON_VALUED, _PYTHON_OTHER, stdin="")
    return False


def _without_program(arguments: Sequence[str], valued: str, other: str, stdin: str) -> bool:
    """stdin: the option that says so itself."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "-":
            return True
        if argument[:1] not in ("-", "+"):
            return False  # a file
        if argument.startswith("--"):
            if argument in ("--help", "--version"):
                return False
            if argument in _LONG_VALUED:
                next(rest, None)
            continue
        for place, letter in enumerate(argument[1:], 2):
            if letter in other:
                return False
            if letter and letter in stdin:
                return True
            if letter in valued:
                if place == len(argument):
                    next(rest, None)
                break
    return True


def refusal_elsewhere(command: Sequence[str]) -> str | None:
    """Why ranks that are not started here can't run this command."""
    if not reads_program(command):
        return None
    return coded(
        LaunchCode.PROGRAM_ON_STDIN,
        f"{' '.join(command)!r} reads its program from stdin, which reaches only ranks that horovodrun starts on this "
        "host itself. Write it to a file that every host can read, and run that.",
    )


def unread_elsewhere() -> str | None:
    """What to say when something waits on stdin that no rank will read."""
    try:
        mode = os.fstat(_STDIN)
        if stat.S_ISREG(mode.st_mode):
            waits = mode.st_size > os.lseek(_STDIN, 0, os.SEEK_CUR)
        else:
            waits = stat.S_ISFIFO(mode.st_mode) and _has_data(_STDIN)
    except OSError:
        return None
    return "The ranks don't get the data on stdin: ranks on other hosts have an empty stdin." if waits else None


def _has_data(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return any(event & select.POLLIN for _, event in poll.poll(0))


@contextlib.contextmanager
def of_ranks(command: Sequence[str], count: int, say: Callable[[str], None]) -> Iterator[list[int | None]]:
    """The descriptor of each rank's stdin, None for an empty one. ValueError: there is no program to run on stdin.

    say: gets a line when the end of a program is long in coming.
    """
    terminal = os.isatty(_STDIN)
    if not reads_program(command) or (terminal and count == 1):
        ours = not terminal or _in_foreground()
        yield [_STDIN if ours else None] + [None] * (count - 1)
        return
    shown = " ".join(command)
    if terminal:
        raise _refused(
            f"{shown!r} reads its program from stdin, which is a terminal; {count} processes can't share it. Name a "
            "file with the program, or give it on stdin: horovodrun ... python - < train.py."
        )
    with contextlib.ExitStack() as stack:
        program = _read_all(shown, say)
        stack.callback(os.close, program)
        descriptors: list[int | None] = []
        for _ in range(count):  # opened once for each rank, so that each has its own position
            own = os.open(f"/proc/self/fd/{program}", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, own)
            descriptors.append(own)
        yield descriptors


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:  # a terminal of another session, as after `setsid`: another program reads there
        return False


def _refused(sentence: str) -> ValueError:
    return ValueError(coded(LaunchCode.PROGRAM_ON_STDIN, sentence))


def _read_all(shown: str, say: Callable[[str], None]) -> int:
    """The descriptor of a file without a name, into which all of stdin was copied."""
    program = os.memfd_create("horovodrun-stdin")
    try:
        size = 0
        if not select.select([_STDIN], [], [], _SAID_AFTER_S)[0]:
            say(f"waiting for the program on stdin, which {shown!r} reads.")
        while piece := os.read(_STDIN, _PIECE):
            size += len(piece)
            if size > PROGRAM_LIMIT_BYTES:
                raise _refused(f"The program on stdin has more than {PROGRAM_LIMIT_BYTES >> 20} MB; give data apart.")
            with open(program, "ab", closefd=False) as file:
                file.write(piece)
        if not size:
            raise _refused(
                f"{shown!r} reads its program from stdin, and there is nothing on stdin: no rank would run anything."
            )
    except BaseException:
        os.close(program)
        raise
    return program
