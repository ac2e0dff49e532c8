"""The helper that outlives its launcher, alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from error_codes import ends_with
from launching import still_alive
from resources import descriptors, eventually

from horovod.base.errors import LaunchCode
from horovod.worker.agent.guardian import ENGINE_THREAD, Guardian, programs_of, session_members, signal_session

SLEEPER = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
DEAF = [sys.executable, "-c", "import signal; signal.signal(15, 1); print('up', flush=True); signal.pause()"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEPER, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def launcher(then: str, command: list[str] = SLEEPER) -> subprocess.Popen[str]:
    """A launcher that starts `command`, tells the guardian, prints both numbers and does `then`."""
    source = f"""
import os, signal, subprocess, sys
from horovod.worker.agent.guardian import Guardian
guardian = Guardian(grace_s=0.2)
child = subprocess.Popen({command!r}, stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
guardian.add(child.pid)
{then}
print(guardian.pid, child.pid, flush=True)
signal.pause()
"""
    return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)


def family_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    assert process.stdout is not None
    return [psutil.Process(int(number)) for number in process.stdout.readline().split()]


@pytest.mark.parametrize("command", [SLEEPER, DEAF])
def test_a_dead_launcher_takes_its_sessions_with_it(command: list[str]) -> None:
    with launcher("", command) as process:
        family = family_of(process)
        process.kill()
        process.wait()
        assert still_alive(family) == []


def test_a_forked_copy_that_holds_the_pipe_does_not_hide_the_death() -> None:
    with launcher("if os.fork() == 0: signal.pause()", SLEEPER) as process:
        family = family_of(process)
        copies = [child for child in psutil.Process(process.pid).children() if child not in family]
        process.kill()
        process.wait()
        try:
            assert still_alive(family) == []
            assert len(copies) == 1
        finally:
            for copy in copies:
                copy.kill()


def test_what_was_dropped_is_left_alone() -> None:
    with launcher("guardian.drop(child.pid)") as process:
        guardian, child = family_of(process)
        process.kill()
        process.wait()
        assert still_alive([guardian]) == []
        assert child.is_running()
        child.kill()


def test_a_clean_end_touches_nothing(sleeper: subprocess.Popen[bytes]) -> None:
    with Guardian() as guardian:
        guardian.add(sleeper.pid)
        helper = psutil.Process(guardian.pid)
    assert not helper.is_running()
    assert sleeper.poll() is None
    guardian.close()


def test_signals_of_the_terminal_do_not_end_it(sleeper: subprocess.Popen[bytes]) -> None:
    with Guardian() as guardian:
        assert os.getsid(guardian.pid) == guardian.pid
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
            os.kill(guardian.pid, signum)
        guardian.add(sleeper.pid)
        assert psutil.Process(guardian.pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)


def test_a_guardian_that_was_killed_raises_nothing() -> None:
    with Guardian() as guardian:
        os.kill(guardian.pid, signal.SIGKILL)
        os.waitid(os.P_PID, guardian.pid, os.WEXITED | os.WNOWAIT)
        guardian.add(1 << 22)
        guardian.drop(1 << 22)


def test_a_guardian_that_was_stopped_holds_nobody_up() -> None:
    with Guardian(close_timeout_s=0.05) as guardian:
        os.kill(guardian.pid, signal.SIGSTOP)
        for _ in range(10_000):  # more than a pipe takes
            guardian.add(1 << 22)
        helper = psutil.Process(guardian.pid)
    helper.wait(60)  # it was killed, and ends when it gets a processor


def test_a_guardian_that_does_not_start_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 1000\n")
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent))
    before, children = descriptors(), psutil.Process().children()
    with pytest.raises(TimeoutError, match=ends_with(LaunchCode.PROCESS_NOT_STARTED, "0.05 s")):
        Guardian(start_timeout_s=0.05)
    assert psutil.Process().children() == children
    assert eventually(lambda: descriptors() <= before)


def test_the_session_of_a_dead_leader_is_found() -> None:
    """An odd command name must not break the reading of /proc."""
    source = "exec -a '(a b) S 1 1' sleep 1000 & echo $!"
    with subprocess.Popen(["bash", "-c", source], stdout=subprocess.PIPE, start_new_session=True, text=True) as leader:
        assert leader.stdout is not None
        child = psutil.Process(int(leader.stdout.readline()))
        os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
        assert session_members(leader.pid) == [child.pid]
        signal_session(leader.pid, signal.SIGKILL)
        assert still_alive([child]) == []
        assert session_members(leader.pid) == []


# A program with a child, which becomes a member of a world, as its engine's thread shows, and no member again.
MEMBER = f"""
import ctypes, subprocess, sys, threading
child = subprocess.Popen(["sleep", "600"])
print(os.getpid(), flush=True)
over = threading.Event()
def engine():
    ctypes.CDLL(None).prctl(15, {ENGINE_THREAD!r}, 0, 0, 0)  # PR_SET_NAME
    print("joined", flush=True)
    over.wait()
sys.stdin.readline()
thread = threading.Thread(target=engine)
thread.start()
sys.stdin.readline()
over.set()
thread.join()
print("left", flush=True)
sys.stdin.readline()
child.kill()
"""


@pytest.mark.parametrize(
    ("wrapper", "is_shell"),
    [
        (["sh", "-c", '"$@"; true', "sh"], True),
        (["sh", "-c", 'sh -c \'"$@"; true\' sh "$@"; true', "sh"], True),
        ([sys.executable, "-c", "import subprocess, sys; subprocess.call(sys.argv[1:])"], False),
    ],
)
def test_the_program_of_a_rank_is_the_member_of_its_world_or_what_a_shell_has_started(
    wrapper: list[str], is_shell: bool
) -> None:
    command = [*wrapper, sys.executable, "-c", "import os\n" + MEMBER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True, text=True, bufsize=1) as leader:
        assert leader.stdin is not None
        assert leader.stdout is not None
        program = int(leader.stdout.readline())
        assert program != leader.pid
        for joins, said in ((False, ""), (True, "joined"), (False, "left")):
            if said:
                leader.stdin.write("\n")
                assert leader.stdout.readline() == f"{said}\n"
            expected = [program if joins or is_shell else leader.pid]
            while said == "left" and programs_of(leader.pid) != expected:
                time.sleep(0)  # the kernel shows a thread for a moment after it was joined
            assert programs_of(leader.pid) == expected
        leader.stdin.write("\n")
        assert leader.wait(60) == 0


def test_a_dead_launcher_lets_the_program_end_before_its_children() -> None:
    program = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"], stdout=-1)
child.stdout.readline()
def asked(signum, frame):
    print("child ended with", child.poll(), file=sys.stderr, flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, asked)
print("up", flush=True)
while True:
    time.sleep(0.05)  # signal.pause() would miss a signal that comes just before it
"""
    source = f"""
import os, signal, subprocess, sys
from horovod.worker.agent.guardian import Guardian
guardian = Guardian(grace_s=60)
child = subprocess.Popen([sys.executable, "-c", {program!r}], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
guardian.add(child.pid)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", source], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.stderr == "child ended with None\n"
