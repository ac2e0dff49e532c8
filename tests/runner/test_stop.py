"""Ctrl-C, other signals, a launcher that is killed: whatever happens, nothing is left."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from error_codes import ends_with
from event_words import AGAIN_TO_END_SOONER, NO_RANK_IS_LEFT, STOPPED_BY_LAUNCHER, tells
from launching import LAUNCHER, Launched, shared_memory, still_alive
from resources import eventually

from horovod.base.errors import LaunchCode

Launch = Callable[..., Launched]
Program = Callable[[str], list[str]]

WAIT = "print('ready')\nwait_for_signals()"
DEAF = """
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
print("ready")
wait_for_signals()
"""
# A child in the same group and one in a group of its own, both deaf.
FAMILY = """
import subprocess
source = "import signal; [signal.signal(n, 1) for n in (2, 15)]; print('up', flush=True); signal.pause()"
deaf = [sys.executable, "-c", source]
children = [subprocess.Popen(deaf, stdout=subprocess.PIPE, preexec_fn=before) for before in (None, os.setpgrp)]
for child in children:
    child.stdout.readline()
print("ready")
wait_for_signals()
"""


def ready(launched: Launched, count: int) -> list[psutil.Process]:
    assert sorted(launched.lines(count)) == [f"[{rank}]<stdout>:ready" for rank in range(count)]
    return launched.remember_family()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_reaches_the_ranks_and_ends_the_job(launch: Launch, program: Program, signum: signal.Signals) -> None:
    before = shared_memory()
    source = f"""
def bye(number, frame):
    print("got", number)
    sys.exit(0)
signal.signal({int(signum)}, bye)
{WAIT}
"""
    launched = launch("-np", "2", *program(source))
    family = ready(launched, 2)
    launched.signal(signum)
    code, out, err = launched.finish()
    assert code == 128 + signum
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:got {int(signum)}" for rank in range(2)]
    assert tells(err, signum.name, NO_RANK_IS_LEFT)
    assert "Traceback" not in err
    assert still_alive(family) == []
    assert shared_memory() <= before


def test_ctrl_c_at_a_terminal(program: Program) -> None:
    """The terminal sends SIGINT to the launcher's group; the ranks, in other sessions, get it from the launcher."""
    main, terminal = pty.openpty()
    # A session leader without a terminal takes the first one that it opens.
    opening = ["sh", "-c", f'exec "$@" <>{os.ttyname(terminal)} >&0 2>&0', "sh"]
    process = subprocess.Popen([*opening, *LAUNCHER, "-np", "2", *program(WAIT)], start_new_session=True)
    shown = b""
    while not all(b"[%d]<stdout>:ready" % rank in shown for rank in range(2)):  # a line may be shown in parts
        shown += os.read(main, 4096)
    os.close(terminal)
    family = psutil.Process(process.pid).children(recursive=True)
    os.write(main, b"\x03")
    while True:
        try:
            shown += os.read(main, 4096)
        except OSError:  # EIO: nobody has the terminal open any more
            break
    os.close(main)
    assert process.wait(60) == 130
    assert AGAIN_TO_END_SOONER.encode() in shown
    assert b"KeyboardInterrupt" in shown  # in the ranks; the launcher shows no traceback of its own
    assert shown.count(b"Traceback") == shown.count(b"<stderr>:Traceback") == 2
    assert still_alive(family) == []


def test_the_second_and_third_ctrl_c_are_for_deaf_ranks(launch: Launch, program: Program) -> None:
    launched = launch("-np", "2", *program(DEAF))
    family = ready(launched, 2)
    assert launched.process.stderr is not None
    launched.signal(signal.SIGINT)
    assert AGAIN_TO_END_SOONER in launched.process.stderr.readline()
    launched.signal(signal.SIGINT)
    while launched.process.poll() is None:  # signals of one kind merge, so send until it has seen enough
        launched.signal(signal.SIGINT)
        select.select([launched.process.stderr], [], [], 0.2)
    code, _, _ = launched.finish()
    assert code == 130
    assert still_alive(family) == []


def test_a_deaf_rank_is_killed_after_its_grace(launch: Launch, program: Program, tmp_path: Path) -> None:
    deaf = tmp_path / "deaf"  # rank 1 ends when rank 0 is
    os.mkfifo(deaf)
    fails = f"if rank == 1: open({str(deaf)!r}).read(); print('ready'); sys.exit(4)\n"
    source = fails + DEAF.replace("wait_for_signals()", f"open({str(deaf)!r}, 'w').close()\nwait_for_signals()")
    launched = launch("-np", "2", *program(source), graces={"failure_grace_s": 0.2, "stop_grace_s": 0.5})
    family = ready(launched, 2)
    code, _, err = launched.finish()
    assert code == 4
    assert f"after that rank 0 was {STOPPED_BY_LAUNCHER}" in err
    assert still_alive(family) == []


def test_a_killed_launcher_leaves_nothing(launch: Launch, program: Program) -> None:
    before = shared_memory()
    launched = launch("-np", "2", *program(WAIT))
    family = ready(launched, 2)
    assert len(family) == 3  # two ranks and the guardian
    launched.signal(signal.SIGKILL)
    assert still_alive(family) == []
    assert shared_memory() <= before


def test_a_killed_launcher_leaves_nothing_of_deaf_families(launch: Launch, program: Program) -> None:
    launched = launch("-np", "1", *program(FAMILY.replace('print("ready")', "signal.signal(15, 1)\nprint('ready')")))
    family = ready(launched, 1)
    assert len(family) == 4
    launched.signal(signal.SIGKILL)
    assert still_alive(family) == []


def test_a_killed_launcher_and_a_killed_guardian_leave_no_rank(launch: Launch, program: Program) -> None:
    launched = launch("-np", "2", *program(WAIT))
    family = ready(launched, 2)
    guardian = next(process for process in family if "guardian.py" in " ".join(process.cmdline()))
    guardian.kill()
    assert still_alive([guardian]) == []
    launched.signal(signal.SIGKILL)
    assert still_alive(family) == []


def test_training_goes_on_without_a_guardian(launch: Launch, program: Program, tmp_path: object) -> None:
    fifo = os.path.join(str(tmp_path), "go")
    os.mkfifo(fifo)
    launched = launch("-np", "1", *program(f"print('ready')\nopen({fifo!r}).read()\nprint('done')"))
    family = ready(launched, 1)
    guardian = next(process for process in family if "guardian.py" in " ".join(process.cmdline()))
    guardian.kill()
    with open(fifo, "w"):
        pass
    assert launched.finish() == (0, "[0]<stdout>:done\n", "")


def test_grandchildren_end_with_the_job(launch: Launch, program: Program) -> None:
    launched = launch("-np", "1", *program(FAMILY.replace("wait_for_signals()\n", "sys.stdin.read(); sys.exit(0)\n")))
    code, out, _ = launched.finish()
    assert (code, out) == (0, "[0]<stdout>:ready\n")


def test_grandchildren_are_found_by_their_session(launch: Launch, program: Program) -> None:
    launched = launch("-np", "2", *program(FAMILY))
    family = ready(launched, 2)
    assert len(family) == 7  # the guardian, two ranks, four grandchildren
    launched.signal(signal.SIGTERM)
    code, _, _ = launched.finish()
    assert code == 143
    assert still_alive(family) == []


def test_signals_for_the_program_are_passed_on(launch: Launch, program: Program) -> None:
    source = f"""
def show(number, frame):
    print("usr1")
    sys.exit(0)
signal.signal(signal.SIGUSR1, show)
{WAIT}
"""
    launched = launch("-np", "1", *program(source))
    ready(launched, 1)
    launched.signal(signal.SIGUSR1)
    assert launched.finish() == (0, "[0]<stdout>:usr1\n", "")


# Saves after the signal what its child, such as a worker of a DataLoader, still gives.
WITH_CHILD = """
import subprocess
source = "import sys; print('up', flush=True); [print(line, end='', flush=True) for line in sys.stdin]"
child = subprocess.Popen([sys.executable, "-c", source], stdin=-1, stdout=-1, text=True, bufsize=1)
child.stdout.readline()
asked = []
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, lambda number, frame: asked.append(number))
print("ready")
while not asked:
    time.sleep(0.01)
child.stdin.write("row\\n")
print("saved", child.stdout.readline().strip(), *asked)
sys.stdout.flush()
child.stdin.close()
child.wait()
"""


@pytest.mark.parametrize(
    ("signum", "wrapper"),
    [
        (signal.SIGTERM, []),
        (signal.SIGINT, []),
        (signal.SIGUSR1, []),
        (signal.SIGTERM, ["sh", "-c", '"$@"; true', "sh"]),
        (signal.SIGUSR2, ["bash", "-c", 'trap : USR2; "$@"; true', "bash"]),
    ],
)
def test_a_signal_is_for_the_program_and_not_for_its_children(
    launch: Launch, program: Program, signum: signal.Signals, wrapper: list[str]
) -> None:
    launched = launch("-np", "2", *wrapper, *program(WITH_CHILD))
    family = ready(launched, 2)
    launched.signal(signum)
    code, out, err = launched.finish()
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:saved row {int(signum)}" for rank in range(2)], err
    assert code == (0 if signum in (signal.SIGUSR1, signal.SIGUSR2) else 128 + signum)
    assert still_alive(family) == []


def test_a_shell_that_starts_its_program_again_ends_too(launch: Launch, program: Program) -> None:
    """Once the program has ended by the signal, the rest of the session gets it."""
    again = ["sh", "-c", 'while true; do "$@"; done', "sh"]
    launched = launch("-np", "1", *again, *program(WAIT), graces={"request_grace_s": 600.0})
    family = ready(launched, 1)
    launched.signal(signal.SIGTERM)
    code, _, _ = launched.finish()
    assert code == 143
    assert still_alive(family) == []


def suspended(launch: Launch, program: Program) -> tuple[Launched, list[psutil.Process]]:
    """A launcher that Ctrl-Z has stopped, and all processes of its rank, which are stopped as well."""
    source = "import subprocess\nsubprocess.Popen(['sleep', '600'])\nprint('ready')\nsignal.sigwait([signal.SIGUSR1])"
    launched = launch("-np", "1", *program(source), child=True)
    family = ready(launched, 1)
    ranks = [process for process in family if "guardian.py" not in " ".join(process.cmdline())]
    assert len(ranks) == 2  # the rank and its child
    launched.signal(signal.SIGTSTP)
    _, status = os.waitpid(launched.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    # The launcher has sent it the signal, which a process takes when it gets a processor.
    assert eventually(lambda: all(process.status() == psutil.STATUS_STOPPED for process in ranks))
    return launched, family


def test_suspend_and_resume(launch: Launch, program: Program) -> None:
    launched, family = suspended(launch, program)
    launched.signal(signal.SIGCONT)
    launched.signal(signal.SIGTERM)
    code, _, _ = launched.finish()
    assert code == 143
    assert still_alive(family) == []


def test_nothing_is_left_of_a_job_whose_launcher_is_killed_after_ctrl_z(launch: Launch, program: Program) -> None:
    """Nobody else would continue its ranks, which would be stopped for ever."""
    launched, family = suspended(launch, program)
    launched.signal(signal.SIGKILL)
    assert still_alive(family) == []


def test_a_reader_that_goes_away_ends_the_job(launch: Launch, program: Program) -> None:
    launched = launch("-np", "2", *program("while True: print('y' * 100)"))
    launched.lines(1)
    family = launched.remember_family()
    assert launched.process.stdout is not None
    launched.process.stdout.close()
    assert launched.process.stderr is not None
    err = launched.process.stderr.read()
    assert launched.process.wait(60) == 128 + signal.SIGPIPE
    assert re.search(ends_with(LaunchCode.OUTPUT_UNUSABLE, "stdout", "Broken pipe"), err)
    assert still_alive(family) == []


def test_ctrl_c_works_while_nobody_reads(launch: Launch, program: Program) -> None:
    """A full pipe holds the ranks back, never the launcher."""
    launched = launch("-np", "2", *program("print('ready')\nwhile True: print('y' * 10_000)"))
    launched.lines(1)
    family = launched.remember_family()
    launched.signal(signal.SIGINT)
    assert launched.process.wait(60) == 130
    assert still_alive(family) == []
