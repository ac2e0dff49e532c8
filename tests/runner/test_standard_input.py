"""What ranks read from stdin: a program goes to all of them, anything else to rank 0, nothing is run in silence."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from event_words import STDIN_IS_EMPTY
from launching import DEADLINE_S, LAUNCHER

from horovod.base.errors import LaunchCode, code_of
from horovod.launch.console.standard_input import reads_program

READ = "print(repr(sys.stdin.read()))"


def _run(*arguments: str, given: bytes | Any = b"", **options: Any) -> subprocess.CompletedProcess[bytes]:
    stdin = {"input": given} if isinstance(given, bytes) else {"stdin": given}
    return subprocess.run([*LAUNCHER, *arguments], capture_output=True, timeout=DEADLINE_S, **stdin, **options)


@pytest.mark.parametrize(
    "command",
    [
        "python",
        "python -",
        "python - train --lr 1",
        "/usr/bin/python3.11 -u -W ignore -X dev -Bs",
        "python -Wignore - train.py",
        "python3 --check-hash-based-pycs never",
        "env -u A B=1 python -u -",
        "numactl --cpunodebind=0 python",
        "bash",
        "bash -s train.py",
        "sh -e -o pipefail",
        "sh -",
    ],
)
def test_commands_whose_program_is_on_stdin(command: str) -> None:
    assert reads_program(command.split())


@pytest.mark.parametrize(
    "command",
    [
        "python train.py",
        "python train.py -",
        "python -u train.py --python python",
        "python -m train",
        "python -uc pass",
        "python -V",
        "python --version",
        "env A=1 python train.py",
        "bash train.sh python",
        "bash -c python",
        "bash -ec python",
        "./train.sh python",
        "cat",
        "pythonic",
    ],
)
def test_commands_whose_program_is_elsewhere(command: str) -> None:
    assert not reads_program(command.split())


PROGRAM = b"import os, sys\nprint(os.environ['HOROVOD_RANK'], sys.argv[1:])\n"


def _lines(output: bytes) -> list[str]:
    return sorted(output.decode().splitlines())


@pytest.mark.parametrize("wrapped", [[], ["env", "A=1"]])
def test_a_program_on_stdin_is_run_by_all_ranks(wrapped: list[str]) -> None:
    done = _run("-np", "3", *wrapped, sys.executable, "-", "x", given=PROGRAM)
    assert (done.returncode, done.stderr) == (0, b"")
    assert _lines(done.stdout) == [f"[{rank}]<stdout>:{rank} ['x']" for rank in range(3)]


def test_a_program_in_a_file_is_run_from_where_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_bytes(b"not Python\n" + PROGRAM)
    with path.open("rb", buffering=0) as file:
        file.readline()
        done = _run("-np", "2", sys.executable, given=file)
    assert _lines(done.stdout) == ["[0]<stdout>:0 []", "[1]<stdout>:1 []"]


def test_a_program_that_is_long_in_coming() -> None:
    with subprocess.Popen(
        [*LAUNCHER, "-np", "2", sys.executable],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as launcher:  # fmt: skip
        assert launcher.stderr is not None
        assert launcher.stderr.readline().startswith(b"horovodrun: waiting for the program on stdin, which ")
        out, _ = launcher.communicate(PROGRAM, DEADLINE_S)
    assert _lines(out) == ["[0]<stdout>:0 []", "[1]<stdout>:1 []"]


def _closed() -> None:
    os.close(0)


@pytest.mark.parametrize(
    "options", [{"given": b""}, {"given": subprocess.DEVNULL}, {"given": None, "preexec_fn": _closed}]
)
def test_no_program_on_stdin_is_refused(options: dict[str, Any]) -> None:
    done = _run("-np", "2", sys.executable, "-", **options)
    assert done.returncode == 2
    assert code_of(done.stderr.decode()) is LaunchCode.PROGRAM_ON_STDIN


@pytest.mark.parametrize("where", [["-H", "other-host:1,b:1"], ["--coordinator", "127.0.0.1:1"]])
def test_a_program_on_stdin_for_other_hosts_is_refused(where: list[str]) -> None:
    done = _run("-np", "2", *where, sys.executable, "-", given=PROGRAM)
    assert done.returncode == 2
    assert code_of(done.stderr.decode()) is LaunchCode.PROGRAM_ON_STDIN


def test_data_for_other_hosts_is_told(tmp_path: Path) -> None:
    told = STDIN_IS_EMPTY.encode()
    (tmp_path / "data").write_text("x")
    arguments = ("-np", "1", "--coordinator", "no address", "true")  # which ends the launcher when it has told
    with (tmp_path / "data").open() as file:
        assert told in _run(*arguments, given=file).stderr
        file.read()
        assert told not in _run(*arguments, given=file).stderr
    assert told in _run(*arguments, given=b"x").stderr
    assert told not in _run(*arguments, given=subprocess.DEVNULL).stderr


def test_data_go_to_rank_0(program: Callable) -> None:
    done = _run("-np", "2", *program(READ), given=b"a\nb")
    assert _lines(done.stdout) == ["[0]<stdout>:'a\\nb'", "[1]<stdout>:''"]


def test_what_no_rank_reads_stays() -> None:
    """As in `while read line; do horovodrun ...; done < file`, and with a pipe that never ends."""
    ours, theirs = os.pipe()
    with open(ours, "rb") as reader, open(theirs, "wb", buffering=0) as writer:
        writer.write(b"next line\n")
        assert _run("-np", "2", "true", given=reader).returncode == 0
        assert reader.readline() == b"next line\n"


ASK = """
if rank == 0:
    print(sys.stdin.isatty(), input("name? "), flush=True)
else:
    print(repr(sys.stdin.read()), flush=True)
"""


def _on_terminal(master: int, until: bytes, shown: bytes = b"") -> bytes:
    while until not in shown:
        shown += os.read(master, 4096)
    return shown


def test_rank_0_asks_on_a_terminal(program: Callable) -> None:
    """The question has no end of line, and is seen before the answer; Ctrl-C still ends the job."""
    command, environ = [*LAUNCHER, "-np", "2", *program(ASK)], {**os.environ, "TERM": "xterm"}
    pid, master = pty.fork()
    if pid == 0:
        os.execve(command[0], command, environ)
    shown = _on_terminal(master, b"[0]<stdout>:name? ")
    os.write(master, b"Ada\n")
    with contextlib.suppress(OSError):  # the last process that had the terminal is gone
        while True:
            shown += os.read(master, 4096)
    os.close(master)
    assert os.waitpid(pid, 0)[1] == 0
    assert b"name? True Ada" in re.sub(rb"\r|\x1b\[K", b"", shown)
    assert b"[1]<stdout>:''" in shown


# Runs a command after os.setsid() or os.setpgrp(). A program of its own: the tests have threads when they fork.
APART = (
    "import os, subprocess, sys; "
    "sys.exit(subprocess.run(sys.argv[2:], preexec_fn=getattr(os, sys.argv[1]), check=False).returncode)"
)


@pytest.mark.parametrize("how", ["setpgrp", "setsid"])
def test_a_launcher_in_the_background_leaves_the_terminal_alone(program: Callable, how: str) -> None:
    command = [sys.executable, "-c", APART, how, *LAUNCHER, "-np", "1", *program(READ)]
    pid, master = pty.fork()
    if pid == 0:
        os.execv(command[0], command)
    shown = b""
    with contextlib.suppress(OSError):
        while True:
            shown += os.read(master, 4096)
    os.close(master)
    assert os.waitpid(pid, 0)[1] == 0
    assert b"[0]<stdout>:''" in shown


def test_a_terminal_has_no_program_for_many() -> None:
    pid, master = pty.fork()
    if pid == 0:
        os.execv(LAUNCHER[0], [*LAUNCHER, "-np", "2", sys.executable])
    shown = b""
    with contextlib.suppress(OSError):
        while True:
            shown += os.read(master, 4096)
    os.close(master)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert b"which is a terminal; 2 processes can't share it" in shown
