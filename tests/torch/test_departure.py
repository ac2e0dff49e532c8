"""When a process leaves its elastic job: the decision, and the signal that asks for it, without any world."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import types

import pytest
from error_codes import ends_with

from horovod.base.errors import SettingCode, TrainingCode
from horovod.common import basics, elastic
from horovod.common.departure import EXIT_CODE, SAME_SECONDS, Departure


class Recorded(Departure):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.ended: list[int] = []
        super().__init__(self.said.append, self.ended.append)


def test_a_process_that_trains_says_it_once_and_leaves() -> None:
    one = Recorded()
    one.begins()
    one.signalled(10.0)
    one.signalled(10.0 + SAME_SECONDS / 2)  # its parent passes it on, too
    one.request("another reason")
    assert one.said == ["it got SIGTERM"]
    assert one.leaves_world() == "it got SIGTERM"
    assert one.ended == []


def test_a_second_signal_ends_it_at_once() -> None:
    one = Recorded()
    one.begins()
    one.signalled(10.0)
    one.signalled(10.0 + SAME_SECONDS)
    assert one.ended == [EXIT_CODE]


def test_between_two_worlds_a_signal_ends_it_at_once_and_a_request_waits_for_the_next() -> None:
    one = Recorded()
    one.begins()
    assert one.leaves_world() == ""
    one.request("reclaimed")
    assert one.said == []
    one.begins()
    assert one.said == ["reclaimed"]
    other = Recorded()
    other.begins()
    other.leaves_world()
    other.signalled(1.0)
    assert (other.ended, other.said) == ([EXIT_CODE], [])


def test_what_was_not_done_by_the_end_of_one_training_is_done_in_the_next() -> None:
    one = Recorded()
    one.begins()
    one.signalled(1.0)
    assert one.ends() == "it got SIGTERM"
    one.begins()
    assert one.said == ["it got SIGTERM"] * 2


def test_an_error_after_a_signal_that_ended_children_too_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Recorded()
    monkeypatch.setattr("horovod.common.departure.current", lambda: types.SimpleNamespace(is_elastic=True))
    monkeypatch.setattr("horovod.common.departure.is_member", lambda: True)
    with one.heeded():
        os.kill(os.getpid(), signal.SIGTERM)
        assert one.explains_error()
        assert one.leaves_world() == "it got SIGTERM"
    assert not one.explains_error()  # nothing listens
    with one.heeded():
        assert not one.explains_error()  # another training


def test_a_job_of_a_fixed_size_is_not_left() -> None:
    with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_INITIALIZED)):
        elastic.leave_at_next_commit()
    basics.init()
    try:
        with pytest.raises(ValueError, match=ends_with(SettingCode.UNSUPPORTED, "HOROVOD_MIN_SIZE")):
            elastic.leave_at_next_commit()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        basics.shutdown()


SCRIPT = """
import ctypes, os, signal, types, threading
from horovod.common import departure as module

module.is_member = lambda: True
module.current = lambda: types.SimpleNamespace(is_elastic=True)
here, there = os.pipe()
departure = module.Departure(say=lambda reason: os.write(there, b"s"))

def read_in_c():
    "Holds this thread in a call of C until something was said."
    buffer = ctypes.create_string_buffer(1)
    ctypes.CDLL(None).read(here, buffer, 1)
    return buffer.raw
"""

SIGNALS = {
    "in a call of C": """
with departure.heeded():
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert read_in_c() == b"s"
    assert departure.leaves_world() == "it got SIGTERM"
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
assert signal.set_wakeup_fd(-1) == -1
""",
    "beside an event loop's descriptor": """
theirs, wakeup = os.pipe()
os.set_blocking(wakeup, False)
signal.set_wakeup_fd(wakeup)
with departure.heeded():
    os.kill(os.getpid(), signal.SIGTERM)
    assert read_in_c() == b"s"
assert signal.set_wakeup_fd(-1) == wakeup
assert os.read(theirs, 9) == bytes([signal.SIGTERM])
""",
    "to a forked child": """
with departure.heeded():
    child = os.fork()
    if not child:
        signal.pause()
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert departure.leaves_world() == ""
""",
    "beside a handler of the program": """
mine = lambda *_: None
signal.signal(signal.SIGTERM, mine)
with departure.heeded():
    assert signal.getsignal(signal.SIGTERM) is mine
signal.signal(signal.SIGTERM, signal.SIG_DFL)
with departure.heeded():
    signal.signal(signal.SIGTERM, mine)
assert signal.getsignal(signal.SIGTERM) is mine
""",
    "in another thread": """
def run():
    with departure.heeded():
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        departure.request("reclaimed")
        assert read_in_c() == b"s"
thread = threading.Thread(target=run)
thread.start()
thread.join()
""",
}


@pytest.mark.parametrize("case", SIGNALS)
def test_a_signal(case: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + SIGNALS[case]], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "Error" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize(
    ("before", "code"), [("", EXIT_CODE), ("signal.signal(signal.SIGTERM, lambda *_: os._exit(7))\n", 7)]
)
def test_the_first_process_of_a_container_is_ended_while_it_waits(before: str, code: int) -> None:
    """The kernel ends such a process by no signal for which it has no handler."""
    script = f"""
import os, signal
{before}assert os.getpid() == 1
from horovod.common.departure import end_by_sigterm_as_pid_1
end_by_sigterm_as_pid_1()
print("waits", flush=True)
signal.pause()
"""
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", sys.executable, "-c", script]
    if subprocess.run([*command[:5], "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs namespaces of users and processes")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        (child,) = _children(process.pid)
        os.kill(child, signal.SIGTERM)
        assert process.wait(60) == code


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(one) for one in re.findall(r"\d+", file.read())]


def test_a_handler_of_a_signal_may_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have interrupted a thread that holds the lock."""
    heard = threading.Event()
    one = Departure(lambda reason: heard.set(), lambda code: None)
    one.begins()
    one.leaves_world()
    monkeypatch.setattr(elastic, "departure", one)
    with one._lock:
        elastic.leave_at_next_commit("reclaimed")
    one.begins()
    one.request("again")
    assert heard.wait(60)
