"""A small process that outlives its launcher for one purpose: to stop the training processes when the launcher is gone.

A launcher can't act on its own SIGKILL, so the guardian is another process: a plain interpreter in its own session,
which ignores Ctrl-C and holds the reading end of a pipe. The launcher tells it each session that it starts ("add
PID") and that it has reaped ("drop PID"). When the pipe closes without a "bye", the launcher is dead, and every session
still on the list gets SIGTERM, a short grace, and SIGKILL: SIGTERM goes to the training program first (`programs_of`),
and to the other processes of the session when that has ended. After "bye" it leaves without touching anything.

It runs as a script (`python -I -S guardian.py FD PID GRACE`) and imports the standard library only: it starts in
milliseconds, holds no thread, no lock and no gRPC state of its launcher, and may be started at any time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

if __name__ != "__main__":  # imported by the launcher, not run as the helper
    from horovod.base.errors import LaunchCode, coded
    from horovod.base.words import reason_of

DEFAULT_GRACE_S = 2.0
START_TIMEOUT_S = 30.0  # until the helper says that it is ready: a busy machine starts interpreters slowly
CLOSE_TIMEOUT_S = 5.0  # from "bye" to the end of the helper
ENGINE_THREAD = b"hvd-progress"  # a thread of each process that is in a world (csrc/engine/driver.cc)
_SHELLS = {"ash", "bash", "busybox", "csh", "dash", "fish", "ksh", "mksh", "sh", "tcsh", "zsh"}
_POLL_S = 0.02


def session_members(leader: int) -> list[int]:
    """Living processes in the session or group that `leader` leads, but not the leader; zombies are not alive.

    A launcher's child is a session leader, so this also finds grandchildren that moved to a group of their own.
    """
    return list(_parents(leader))


def _parents(leader: int) -> dict[int, int]:
    """The parent of each process that `session_members` finds."""
    parents = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == leader:
            continue
        # proc(5): "pid (comm) state ppid pgrp session ..."; comm may itself hold spaces and parentheses.
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as stat:
            state, parent, group, session = stat.read().rpartition(b")")[2].split()[:4]
            if leader in (int(group), int(session)) and state not in (b"Z", b"X"):
                parents[int(name)] = int(parent)
    return parents


def programs_of(leader: int) -> list[int]:
    """The processes of this session that a signal for the rank is meant for: its training program.

    A signal for the whole session would end the children of the program, such as the workers of a DataLoader, and with
    them the step that waits for their rows, just when the program wants to save a checkpoint. A signal for the leader
    alone would not reach the program if the leader is a shell, which waits for its child before it acts on a signal.

    The program is the process that has joined a world, which its engine's thread shows. Before that, or in a program
    that never does, it is the leader, or what the leader has started if the leader is a shell.
    """
    children: dict[int, list[int]] = {}
    for pid, parent in _parents(leader).items():
        children.setdefault(parent, []).append(pid)
    return _topmost(leader, children, _has_joined) or _topmost(leader, children, _is_no_shell) or [leader]


def _topmost(leader: int, children: dict[int, list[int]], is_meant: Callable[[int], bool]) -> list[int]:
    """From the leader downwards, the first process of each branch for which `is_meant` is true."""
    found, left = [], [leader]
    while left:
        pid = left.pop()
        if is_meant(pid):
            found.append(pid)
        else:
            left += children.get(pid, ())
    return found


def _has_joined(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/comm", "rb") as name:
                if name.read().strip() == ENGINE_THREAD:
                    return True
    return False


def _is_no_shell(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) not in _SHELLS  # a script's own name is in "comm"
    return True


def signal_programs(leader: int, signum: int) -> list[int]:
    """Sends `signum` to the processes of `programs_of`, and returns them."""
    programs = programs_of(leader)
    for pid in programs:
        with contextlib.suppress(OSError):
            os.kill(pid, signum)
    return programs


def signal_session(leader: int, signum: int) -> None:
    """Sends `signum` to the group of `leader` and to the rest of its session.

    The caller holds `leader` unreaped or has only just lost it, so its number has not been given to another process.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signum)
    for pid in session_members(leader):
        with contextlib.suppress(OSError):
            if os.getpgid(pid) != leader:
                os.kill(pid, signum)


def is_alive(pid: int) -> bool:
    """Whether this process has not ended; a zombie has."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as stat:
        return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return False


def _stop(leaders: set[int], grace_s: float) -> None:
    told = {leader: signal_programs(leader, signal.SIGTERM) for leader in leaders}
    for leader in leaders:
        signal_session(leader, signal.SIGCONT)  # a stopped process cannot act on SIGTERM
    deadline = time.monotonic() + grace_s
    living = leaders
    while living and time.monotonic() < deadline:
        for leader in [leader for leader, programs in told.items() if not any(map(is_alive, programs))]:
            del told[leader]
            signal_session(leader, signal.SIGTERM)
        time.sleep(_POLL_S)
        living = {leader for leader in living if is_alive(leader) or session_members(leader)}
    for leader in leaders:
        signal_session(leader, signal.SIGKILL)


def _watch(pipe: int, launcher: int) -> set[int]:
    """Waits until the launcher is gone, and returns the sessions to stop; or until it says bye, and returns none."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    # A forked copy of the launcher may hold the pipe open, so the process is watched too (Linux 5.3 and later).
    process = -1
    with contextlib.suppress(OSError, AttributeError):
        process = os.pidfd_open(launcher)
        poll.register(process, select.POLLIN)
    leaders: set[int] = set()
    rest = b""
    while True:
        ready = dict(poll.poll(1000))
        if pipe in ready:
            data = os.read(pipe, 4096)
            if not data:
                return leaders
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                word, _, number = line.partition(b" ")
                if word == b"bye":
                    return set()
                (leaders.add if word == b"add" else leaders.discard)(int(number))
        elif process in ready or os.getppid() != launcher:
            return leaders


def main(pipe: int, launcher: int, grace_s: float) -> None:
    """The body of the helper process."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(signum, signal.SIG_IGN)
    os.write(1, b"r")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)  # so that a reader of the launcher's output sees its end without waiting for this process
    _stop(_watch(pipe, launcher), grace_s)


class Guardian:
    """The helper as the launcher sees it. Start it before the first training process; `close` it when all are reaped.

    Training goes on when the helper itself was killed: the calls then do nothing.
    """

    def __init__(
        self,
        grace_s: float = DEFAULT_GRACE_S,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        """OSError with a sentence when it cannot be started."""
        self._close_timeout_s = close_timeout_s
        try:
            reader, self._pipe = os.pipe()
        except OSError as error:
            raise _cannot_start(error) from error
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(reader), str(os.getpid()), str(grace_s)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                pass_fds=(reader,),
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._pipe)
            raise _cannot_start(error) from error
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(reader)
        os.set_blocking(self._pipe, False)
        assert self._process.stdout is not None
        with self._process.stdout as ready:  # one byte: the helper now ignores the signals that it must survive
            poll = select.poll()
            poll.register(ready, select.POLLIN)
            if not poll.poll(start_timeout_s * 1000):
                self._kill()
                os.close(self._pipe)
                sentence = (
                    f"The helper that ends processes when their launcher is killed (pid {self._process.pid}) did not "
                    f"start within {start_timeout_s:g} s."
                )
                raise OSError(errno.ETIMEDOUT, coded(LaunchCode.PROCESS_NOT_STARTED, sentence))
            ready.read(1)

    @property
    def pid(self) -> int:
        """The helper's process id."""
        return self._process.pid

    def add(self, leader: int) -> None:
        """From now on the session that `leader` leads is stopped when this process dies."""
        self._tell(f"add {leader}\n")

    def drop(self, leader: int) -> None:
        """Call this before `leader` is reaped, because its number may then belong to another process."""
        self._tell(f"drop {leader}\n")

    def close(self) -> None:
        """Ends the helper. May be called again."""
        if self._pipe >= 0:
            self._tell("bye\n")
            os.close(self._pipe)
            self._pipe = -1
            try:
                self._process.wait(self._close_timeout_s)
            except subprocess.TimeoutExpired:  # the helper was stopped by a signal; it has nothing left to do
                self._kill()

    def __enter__(self) -> Guardian:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # the helper waits in the kernel, where no signal can end it
            self._process.wait(self._close_timeout_s)

    def _tell(self, line: str) -> None:
        # BlockingIOError: the helper was stopped by a signal, and thousands of lines wait for it already.
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._pipe, line.encode())


def _cannot_start(error: OSError) -> OSError:
    sentence = f"The helper that ends processes cannot be started: {reason_of(error)}."
    return OSError(error.errno, coded(LaunchCode.PROCESS_NOT_STARTED, sentence))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
