"""horovod.run, and the status line, with ranks on hosts that only ssh reaches.

These are real sshd's, each in a network namespace of its own.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from error_codes import ends_with
from launching import DEADLINE_S
from sshd_hosts import Hosts

from horovod.base.errors import LaunchCode

WORK = """
import os
import horovod

def place(word, *, end=""):
    from horovod.common import basics as hvd
    hvd.init()
    return f"{word} {hvd.rank()} {hvd.local_rank()} {hvd.cross_rank()} {os.environ['HOROVOD_HOSTNAME']}{end}"

def large(size):
    return bytes([int(os.environ["HOROVOD_RANK"])]) * size

def fail():
    from horovod.common import basics as hvd
    hvd.init()
    if hvd.rank() == 3:
        raise LookupError("no such batch")
    import signal
    signal.pause()

def leave():
    os._exit(0)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path, 3) as hosts:
        yield hosts


def call(hosts: Hosts, expression: str) -> tuple[str, str]:
    """What a program on the first host prints, stdout and stderr; `HOSTS` there are two slots on each of the others."""
    program = hosts.folder / "program.py"
    given = ",".join(f"{name}:2" for name in hosts.names[1:])
    body = f"HOSTS = {given!r}\ntry:\n    print({expression})\nexcept RuntimeError as error:\n    print(error)\n"
    program.write_text(WORK + body)
    done = subprocess.run(
        [*hosts.inside(hosts.names[0]), sys.executable, str(program)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=hosts.environ,
    )
    return done.stdout, done.stderr


def test_results_come_by_rank(hosts: Hosts) -> None:
    out, err = call(hosts, 'horovod.run(place, ("rank",), {"end": "!"}, num_proc=4, hosts=HOSTS)')
    first, second = hosts.names[1:]
    expected = [f"rank {rank} {rank % 2} {rank // 2} {first if rank < 2 else second}!" for rank in range(4)]
    assert out == f"{expected}\n", err


def test_large_results(hosts: Hosts) -> None:
    size = 20_000_000
    expression = f"[(len(one), set(one)) for one in horovod.run(large, ({size},), num_proc=3, hosts=HOSTS)]"
    out, err = call(hosts, expression)
    assert out == f"{[(size, {rank}) for rank in range(3)]}\n", err


def test_an_exception_names_rank_and_host_and_has_its_traceback(hosts: Hosts) -> None:
    out, err = call(hosts, "horovod.run(fail, num_proc=4, hosts=HOSTS)")
    facts = [f"Rank 3 on host {hosts.names[2]} ", "LookupError: no such batch\n", "in fail\n"]
    assert re.search(ends_with(LaunchCode.FUNCTION_RAISED, *facts), out), err


def test_a_rank_without_a_result(hosts: Hosts) -> None:
    out, err = call(hosts, "horovod.run(leave, num_proc=2, hosts=HOSTS)")
    assert re.search(ends_with(LaunchCode.RANK_FAILED, f"Rank 0 on host {hosts.names[1]} ", "exit code 0"), out), err


def test_a_host_that_cannot_be_used(hosts: Hosts) -> None:
    hosts.stop_sshd(hosts.names[2])
    out, err = call(hosts, "horovod.run(place, ('',), num_proc=4, hosts=HOSTS)")
    assert out.startswith("could not connect to some hosts via ssh"), err
    assert re.search(ends_with(LaunchCode.UNKNOWN_HOST, f"{hosts.names[2]}: "), out)


def test_a_terminal_shows_hosts_that_connect_and_ranks_that_join(hosts: Hosts) -> None:
    """The second host's sshd is stopped as a process until the first host has been seen to be ready."""
    program = hosts.folder / "program.py"
    program.write_text("from horovod.common import basics as hvd\nhvd.init()\n")
    master, terminal = pty.openpty()
    slow = hosts.server(hosts.names[2])
    slow.send_signal(signal.SIGSTOP)
    command = [*hosts.inside(hosts.names[0]), sys.executable, "-m", "horovod.launch", "-np", "4", "-H"]
    command += [",".join(f"{name}:2" for name in hosts.names[1:]), sys.executable, str(program)]
    environ = {**hosts.environ, "TERM": "xterm"}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, env=environ) as process:
        os.close(terminal)
        try:
            shown = b""
            line = f"\rhorovodrun: 1 of 2 hosts are ready; waiting for {hosts.names[2]}\x1b[K".encode()
            while line not in shown:
                shown += os.read(master, 4096)
            slow.send_signal(signal.SIGCONT)
            with contextlib.suppress(OSError):  # the last process that had the terminal is gone
                while data := os.read(master, 4096):
                    shown += data
            assert process.wait(DEADLINE_S) == 0, shown
        finally:
            slow.send_signal(signal.SIGCONT)
            process.kill()
            os.close(master)
    assert shown.endswith(b"\r\x1b[K"), "the line goes away"
