"""That no committed work of an elastic job is lost or done again without a word: launchers and real processes.

The stories of the same rule, without processes, are in tests/coordinator/stories/work.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest
from agents import Agents
from error_codes import ends_with
from launching import Launched
from test_changing_sizes import FIRST_SAYS

from horovod.base.errors import STATE_LOST_EXIT, WorldCode
from horovod.coordinator.config import Limits

Run = Callable[..., CompletedProcess[str]]
Launch = Callable[..., Launched]
Program = Callable[[str], list[str]]

# Six steps, each committed. `happens(state, "...")` is called at the start, after each commit and after the function.
TRAINS = f"""
from array import array
from horovod._core import OpSpec
from horovod.common import basics as hvd
from horovod.common.elastic import State, run_fn
from horovod.worker.runtime.context import current

incarnation = int(os.environ["HOROVOD_INCARNATION"])

def total(number):
    data = array("f", [float(number)])
    pointer = data.buffer_info()[0]
    current().engine.submit(OpSpec(0), "allreduce.total", [(pointer, pointer, 7, (1,))]).result()
    return int(data[0])
{FIRST_SAYS}
class Steps(State):
    def __init__(self):
        super().__init__(first_says, hvd.rank)
        self.steps = self.saved = 0
    def save(self):
        self.saved = self.steps
    def restore(self):
        self.steps = self.saved
    def sync(self):
        self.steps = total(0 if hvd.rank() else self.steps)
        print("begins", self.steps, flush=True)

def train(state):
    while state.steps < 6:
        total(1)
        state.steps += 1
        state.commit()
        print("step", state.steps, flush=True)
        total(0)
        happens(state.steps)
    return state.steps

hvd.init()
print("took", run_fn(train, hvd.join_again)(Steps()), flush=True)
happens("end")
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
ENDS = """
import psutil
def ends(path):
    "Waits until the process has ended that writes its number there."
    try:
        while not os.path.exists(path) or psutil.Process(int(open(path).read() or 1)).status() != psutil.STATUS_ZOMBIE:
            os.sched_yield()
    except psutil.NoSuchProcess:
        pass
"""


def source(happens: str) -> str:
    """happens: the body of a function of `at`, the number of steps or "end"."""
    return f"{ENDS}\ndef happens(at):\n{happens}\n{TRAINS}"


def begun(out: str) -> list[int]:
    return [int(steps) for steps in re.findall(r">:begins (\d)", out)]


@pytest.mark.parametrize(
    ("count", "end", "how"),
    [(2, KILL, "signal 9 (SIGKILL)"), (2, "raise SystemExit(1)", "exit code 1"), (1, KILL, "signal 9 (SIGKILL)")],
)
def test_a_job_does_not_begin_anew_when_all_fail_at_once(
    horovodrun: Run, program: Program, tmp_path: Path, count: int, end: str, how: str
) -> None:
    """The exit code says that the state is lost, the last line also how the process ended that held it."""
    here = tmp_path / "here"  # one that fails while another is in their last allreduce would leave that one behind
    here.mkdir()
    text = source(
        f"""
    if at == 3:
        open({str(here)!r} + f"/{{rank}}", "w").close()
        while len(os.listdir({str(here)!r})) < {count}:
            os.sched_yield()
        {end}
"""
    )
    done = horovodrun("-np", f"{count}", "--min-np", "1", *program(text))
    assert done.returncode == STATE_LOST_EXIT, done.stderr
    assert begun(done.stdout) == [0] * count
    assert re.search(ends_with(WorldCode.STATE_LOST, "Before that, slot", how), done.stderr.splitlines()[-1])
    assert re.search(ends_with(WorldCode.STATE_LOST, "HOROVOD_ELASTIC_BEGIN_ANEW=1", "HOROVOD_JOB"), done.stderr)
    assert re.search(ends_with(WorldCode.STATE_LOST, "Slot", f"exit code {STATE_LOST_EXIT}"), done.stderr)


def test_it_begins_anew_where_a_person_says_so(horovodrun: Run, program: Program) -> None:
    text = source(f"    if at == 3 and incarnation == 1: {KILL}")
    done = horovodrun("-np", "2", "--min-np", "1", "--elastic-begin-anew", *program(text))
    assert done.returncode == 0, done.stderr
    assert begun(done.stdout)[:3] == [0, 0, 0]
    assert "The training starts from the beginning" in done.stderr
    assert "took 6" in done.stdout


def test_processes_that_were_killed_before_a_commit_are_replaced(horovodrun: Run, program: Program) -> None:
    text = source("    pass").replace("def train(state):\n", f"def train(state):\n    if incarnation == 1: {KILL}\n")
    done = horovodrun("-np", "2", "--min-np", "1", *program(text))
    assert done.returncode == 0, done.stderr
    assert "took 6" in done.stdout


@pytest.mark.parametrize("first", ["", "hvd.shutdown(); "], ids=["at once", "after hvd.shutdown()"])
def test_a_crash_after_the_work_is_done_repeats_nothing(
    horovodrun: Run, program: Program, tmp_path: Path, first: str
) -> None:
    """The other process lives on until the crash was noticed, and ends well; the crash is the job's exit code."""
    crashed = tmp_path / "crashed"
    text = source(
        f"""
    if at == "end" and rank == 1:
        {first}open({str(crashed)!r}, "w").write(str(os.getpid())); os.kill(os.getpid(), signal.SIGSEGV)
    if at == "end":
        ends({str(crashed)!r})
        print("saved", flush=True)
"""
    )
    done = horovodrun("-np", "2", "--min-np", "1", *program(text))
    assert done.returncode == 128 + signal.SIGSEGV, done.stderr
    assert begun(done.stdout) == [0, 0]
    assert done.stdout.count("took 6") == 2
    assert "saved" in done.stdout


def test_a_process_that_had_left_and_ends_late_fails_no_job(horovodrun: Run, program: Program, tmp_path: Path) -> None:
    """What the world knew at its end decides, not how long a process takes to end."""
    over = tmp_path / "over"
    text = source(
        f"""
    if at == 3 and rank == 1:
        hvd._leave("it has failed", failed=True)
        ends({str(over)!r})
        os._exit(7)
    if at == "end":
        open({str(over)!r}, "w").write(str(os.getpid()))
"""
    )
    done = horovodrun("-np", "2", "--min-np", "1", *program(text))
    assert done.returncode == 0, done.stderr
    assert "[0]<stdout>:took 6" in done.stdout


def test_a_replacement_waits_for_the_stopped_process_that_holds_the_state(launch: Launch, program: Program) -> None:
    text = source(
        f"""
    if incarnation == 1 and at == 3 and rank == 1: {KILL}
    if incarnation == 1 and at == 4:
        print("stops", os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
"""
    )
    options = ("-np", "2", "--min-np", "1")
    launched = launch(
        *options,
        *program(text),
        environ={"HOROVOD_ELASTIC_HUNG_SECONDS": "0.5", "HOROVOD_LOG_LEVEL": "info"},
    )
    stopped = 0
    for line in launched.process.stdout:  # type: ignore[union-attr]
        if "stops" in line:
            stopped = int(line.rsplit(" ", 1)[1])
            break
    for line in launched.process.stderr:  # type: ignore[union-attr]
        if "to come back with the job's committed state" in line:
            break
    psutil.Process(stopped).send_signal(signal.SIGCONT)
    code, out, err = launched.finish()
    assert code == 0, out + err
    first, second = begun(out)
    assert first == second >= 4
    assert out.count("took 6") == 2


INFO = {"HOROVOD_LOG_LEVEL": "info"}


def holds_until(go: Path) -> str:
    """The first process holds what was committed, and takes no further step until the file is there."""
    return f"""
    if at == 3 and incarnation == 1 and not rank:
        print("holds", os.getpid(), flush=True)
        while not os.path.exists({str(go)!r}):
            time.sleep(0.05)
"""


def holder_of(launched: Launched) -> psutil.Process:
    """The process that holds the state, once it does."""
    for line in launched.process.stdout:  # type: ignore[union-attr]
        if "holds" in line:
            return psutil.Process(int(line.rsplit(" ", 1)[1]))
    raise AssertionError(launched.finish())


def wait_for_a_newcomer(launched: Launched) -> None:
    for line in launched.process.stderr:  # type: ignore[union-attr]
        if "to join at their next commit" in line:
            return
    raise AssertionError(launched.finish())


def test_newcomers_of_another_host_do_not_begin_anew_when_the_host_with_the_state_fails(
    tmp_path: Path, launch: Launch, program: Program
) -> None:
    """A program finds the second host once the first one holds the state."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1")
    options = ["-np", "1", "--min-np", "1", "--max-np", "2", "--host-discovery-script", f"cat {hosts}"]
    launched = launch(*options, *program(source(holds_until(tmp_path / "go"))), environ=INFO)
    holder = holder_of(launched)
    (tmp_path / "new").write_text("localhost:1\n127.0.0.1:1")
    (tmp_path / "new").rename(hosts)
    wait_for_a_newcomer(launched)
    holder.kill()
    code, out, err = launched.finish()
    assert code == STATE_LOST_EXIT, out + err
    assert begun(out) == [], "the newcomer takes no step"
    assert re.search(ends_with(WorldCode.STATE_LOST), err)


@pytest.mark.parametrize("returns", [False, True], ids=["lost", "back"])
def test_newcomers_of_another_host_wait_for_the_host_that_holds_the_state(
    tmp_path: Path, launch: Launch, program: Program, returns: bool
) -> None:
    """It is lost with its agent and all of its processes, or it stands still for a while."""
    with Agents(tmp_path, Limits(reattach_grace_s=1.0)) as agents:
        first = agents.add("h1", 1, "--orphan-grace-seconds", "60" if returns else "1")
        options = ["-np", "1", "--min-np", "1", "--max-np", "2", "--elastic-hung-seconds", "0.5"]
        command = program(source(holds_until(tmp_path / "go")))
        launched = launch(*agents.options, *options, *command, environ={**agents.environ, **INFO})
        holder = holder_of(launched)
        family = psutil.Process(first.pid).children(recursive=True)
        agents.add("h2", 1)
        wait_for_a_newcomer(launched)
        if returns:
            holder.suspend()
        else:
            for one in (psutil.Process(first.pid), *family):
                one.kill()
        if returns:
            for line in launched.process.stderr:  # type: ignore[union-attr]
                if "to come back with the job's committed state" in line:
                    break
            (tmp_path / "go").touch()
            holder.resume()
        code, out, err = launched.finish()
        if returns:
            assert code == 0, out + err
            first_begins, second_begins = begun(out)
            assert first_begins == second_begins >= 3, "both, with what the holder had"
        else:
            assert code == STATE_LOST_EXIT, out + err
            assert begun(out) == [], "the newcomer takes no step"
            assert re.search(ends_with(WorldCode.STATE_LOST), err)
