"""Random runs of elastic jobs with real processes, each checked by what its processes wrote down (committed_work.py).

Kinds of jobs: `here` (horovodrun on this machine), `agents` (horovodrun on two agents, with a coordinator that is
killed as well), `hand` (processes without a launcher, two coordinators and etcd).

A seed fixes what happens in which order, after which step, and with which delay. Which process is hit, and where it is
then, depends on the machine: runs of one seed are not alike. So more runs find more.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from agents import Agents, CoordinatorProcess
from committed_work import STATE_LOST, Broken, Record, check, read
from etcd_server import Etcd
from launching import LAUNCHER
from replicas import Replica

TESTS = Path(__file__).resolve().parents[2]
TOTAL = 48
DEADLINE_S = 120.0  # of a run, which takes some seconds on a machine that has nothing else to do
LEFT_S = 15.0  # what still runs so long after the end is left behind
MARK = "ELASTIC_RUN"  # in the environment of all that belongs to a run
MOST_BY_HAND = 16  # processes of a run
GRACES = ("--reattach-grace-seconds", "3", "--keepalive-timeout-seconds", "3")
LIMITS = {
    "HOROVOD_ELASTIC_HUNG_SECONDS": "1",
    "HOROVOD_ELASTIC_SETTLE_SECONDS": "0.2",
    "HOROVOD_ELASTIC_TIMEOUT": "60",
    "HOROVOD_KEEPALIVE_TIMEOUT_SECONDS": "3",
    "HOROVOD_REATTACH_GRACE_SECONDS": "3",
    "HOROVOD_LOG_LEVEL": "info",
}
# How often each happens, beside the others.
FAULTS = {
    "kill": 6,
    "kill rank 0": 3,
    "kill two": 2,
    "kill all but one": 2,
    "kill all": 1,
    "stop": 4,
    "stop all": 1,
    "leave": 3,
    "raise": 2,
    "replacements fail": 2,
    "crash at the end": 2,
}
OF_KIND = {
    "here": {},
    "agents": {"restart the coordinator": 4, "restart an agent": 2, "stop an agent": 1},
    "hand": {"restart the coordinator": 3, "stop a coordinator": 2, "restart etcd": 2, "newcomer": 4},
}
STOPS_S = (0.3, 0.9, 1.5, 4.0, 6.0)  # shorter and longer than the limits above


@dataclass(frozen=True)
class Fault:
    what: str
    step: int  # it is due when a process has so many
    delay_s: float  # and so much time has passed
    choice: float  # among those to which it can happen
    lasts_s: float


def schedule(kind: str, dice: random.Random) -> list[Fault]:
    table = FAULTS | OF_KIND[kind]
    steps = sorted(min(dice.randrange(TOTAL + 4), TOTAL) for _ in range(dice.randint(2, 5)))
    kinds = dice.choices(list(table), list(table.values()), k=len(steps))
    delays = [dice.choice([0.0, dice.random() / 10, dice.random()]) for _ in steps]
    return [
        Fault(what, step, delay_s, dice.random(), dice.choice(STOPS_S))
        for what, step, delay_s in zip(kinds, steps, delays, strict=True)
    ]


class RandomRun:
    """One job, from its start until nothing of it runs any more."""

    def __init__(self, folder: Path, kind: str, seed: int) -> None:
        dice = random.Random(f"{kind} {seed}")
        self.kind = kind
        self._folder = folder
        self._faults = schedule(kind, dice)
        self._size = dice.randint(2, 3)
        self._most = self._size if kind == "here" else dice.choice([self._size, 4])
        # On agents a host on which three processes have failed, and none elsewhere, is given up.
        self._fewest = 1 if kind == "agents" else dice.choice([1, 1, 1, 2, self._size])
        self._anew = dice.random() < 0.2
        self._job = f"run-{kind}-{seed}"
        self._plan = {
            "total": TOTAL,
            "every": dice.choice([1, 1, 2, 3]),
            "step_s": dice.choice([0.005, 0.02, 0.05]),
            "start_s": dice.choice([0, 0, 1.0]),
            "end_s": dice.choice([0, 0, 0.5]),
        }
        sizes = f"{self._size} processes, {self._fewest} to {self._most}{', may begin anew' if self._anew else ''}"
        self.story = [f"{self._job}: {sizes}, {self._plan}", "; ".join(fault.what for fault in self._faults)]
        self._began_s = time.monotonic()
        self._latest: dict[int, Record] = {}  # what each process wrote last
        self._gone: set[int] = set()  # processes that were killed, or told to end
        self._left_to_fail = 3 * self._size - 1  # as many failures as the job survives, wherever they happen
        self._due: list[tuple[float, Callable[[], None]]] = []  # when, and what
        self._launcher: subprocess.Popen[bytes] | None = None
        self._own: dict[int, subprocess.Popen[bytes]] = {}  # those that no launcher starts
        self._ended: set[int] = set()  # of those
        self._said = b""  # by processes, and not a whole line yet

    # -- the run -------------------------------------------------------------------------------------------------------

    def play(self) -> list[Broken]:
        with ExitStack() as stack:
            self._log = stack.enter_context((self._folder / "test.log").open("a"))
            os.mkfifo(self._folder / "events")
            self._events = os.open(self._folder / "events", os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, self._events)
            self._write("job", total=TOTAL, min=self._fewest, anew=self._anew)
            self._start(stack)
            stack.callback(self._end_all)
            deadline_s = time.monotonic() + DEADLINE_S
            while self._runs() and time.monotonic() < deadline_s:
                self._wait(deadline_s)
            self._note_the_end()
        return check(read(self._folder))

    def tell(self, line: str) -> None:
        self.story.append(f"{time.monotonic() - self._began_s:7.3f}  {line}")

    def _write(self, what: str, **facts: Any) -> None:
        self._log.write(json.dumps({"at": time.monotonic_ns(), "who": "test", "what": what, **facts}) + "\n")
        self._log.flush()

    def _start(self, stack: ExitStack) -> None:
        if self.kind == "hand":
            self._etcd = stack.enter_context(Etcd(self._folder, 1))
            log = stack.enter_context((self._folder / "coordinators").open("w"))
            self._replicas = [Replica(self._etcd.url, "--insecure", *GRACES, log=log) for _ in range(2)]
            for replica in self._replicas:
                stack.enter_context(replica)
            for _ in range(self._size):
                self._start_by_hand()
            return
        environment = self._environment()
        options = ["-np", str(self._size), "--min-np", str(self._fewest), "--max-np", str(self._most), "--verbose"]
        options += ["--elastic-begin-anew"] if self._anew else []
        if self.kind == "agents":
            self._coordinator = CoordinatorProcess(self._folder, "--store", f"sqlite:{self._folder}/store", *GRACES)
            self._agents = stack.enter_context(Agents(self._folder, coordinator=self._coordinator))
            for host in ("h1", "h2"):
                self._agents.add(host)
            options += self._agents.options
            environment["HOROVOD_TOKEN"] = self._coordinator.token
        with (self._folder / "said").open("w") as said:
            self._launcher = subprocess.Popen(
                [*LAUNCHER, *options, *self._command()],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=environment,
                start_new_session=True,
            )

    def _command(self) -> list[str]:
        return [sys.executable, str(TESTS / "elastic_steps.py"), str(self._folder), json.dumps(self._plan)]

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        return {**inherited, **LIMITS, MARK: str(self._folder)}

    def _start_by_hand(self) -> None:
        own = {
            "HOROVOD_COORDINATOR": ",".join(one.address for one in self._replicas),
            "HOROVOD_JOB": self._job,
            "HOROVOD_MIN_SIZE": str(self._fewest),
            "HOROVOD_MAX_SIZE": str(self._most),
            "HOROVOD_SIZE": str(self._size),
            "HOROVOD_ELASTIC_BEGIN_ANEW": str(int(self._anew)),
            "HOROVOD_INCARNATION": "1" if len(self._own) < self._size else "2",
        }
        with (self._folder / f"said-{len(self._own)}").open("w") as said:
            process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=self._environment() | own
            )
        self._own[process.pid] = process
        self.tell(f"{process.pid} starts")

    def _runs(self) -> bool:
        if self._launcher is not None:
            return self._launcher.poll() is None
        for number, (pid, process) in enumerate(self._own.items()):
            if pid not in self._ended and process.poll() is not None:
                self._ended.add(pid)
                said = (self._folder / f"said-{number}").read_text(errors="replace")
                self._write("exit", whom=pid, code=process.returncode, said=said)
                self.tell(f"{pid} ends with {process.returncode}")
                # Whatever starts such processes would start another one.
                if process.returncode and STATE_LOST not in said and len(self._own) < MOST_BY_HAND:
                    self._later(0.2, self._start_by_hand)
        return len(self._ended) < len(self._own) or any(act == self._start_by_hand for _, act in self._due)

    def _wait(self, deadline_s: float) -> None:
        """Until something is due, has been written, or has ended."""
        processes = [self._launcher] if self._launcher else [self._own[pid] for pid in self._own.keys() - self._ended]
        ends = [os.pidfd_open(process.pid) for process in processes]
        try:
            next_s = min([deadline_s, *(at_s for at_s, _ in self._due)])
            if self._events in select.select([self._events, *ends], [], [], max(0.0, next_s - time.monotonic()))[0]:
                self._listen()
        finally:
            for end in ends:
                os.close(end)
        now_s = time.monotonic()
        for one in [one for one in self._due if one[0] <= now_s]:
            self._due.remove(one)
            one[1]()

    def _listen(self) -> None:
        *lines, self._said = (self._said + os.read(self._events, 1 << 16)).split(b"\n")
        for line in lines:
            record = json.loads(line)
            before = self._latest.get(record["who"], {})
            self._latest[record["who"]] = {**before, **record}
            if record["what"] in ("starts", "begins", "returns", "fails"):
                facts = {name: record[name] for name in ("world", "rank", "size", "step") if name in record}
                self.tell(f"{record['who']} {record['what']} {facts or ''}")
            while self._faults and record.get("step", -1) >= self._faults[0].step:
                fault = self._faults.pop(0)
                self._later(fault.delay_s, lambda fault=fault: self._happen(fault))  # type: ignore[misc]

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, act))

    def _start_later(self, seconds: float, start: Callable[[], None]) -> None:
        """A coordinator, again and again: it ends where its store can't be reached."""

        def attempt() -> None:
            try:
                start()
            except AssertionError:
                self._start_later(0.5, start)

        self._later(seconds, attempt)

    # -- what happens --------------------------------------------------------------------------------------------------

    def _happen(self, fault: Fault) -> None:
        self.tell(fault.what)
        here = self._here()
        some = sorted(here, key=lambda pid: (pid * 7919 + int(fault.choice * 1000)) % 1009)
        match fault.what:
            case "kill":
                self._end(some[:1], signal.SIGKILL, "kill")
            case "kill rank 0":
                first = [pid for pid in here if self._latest[pid].get("rank") == 0]
                first.sort(key=lambda pid: -self._latest[pid]["world"])
                self._end(first[:1], signal.SIGKILL, "kill")
            case "kill two":
                self._end(some[:2], signal.SIGKILL, "kill")
            case "kill all but one":
                self._end(some[1:], signal.SIGKILL, "kill")
            case "kill all":
                self._end(some, signal.SIGKILL, "kill")
            case "leave":
                self._end(some[:1], signal.SIGTERM, "leave")
            case "raise":
                self._end(some[:1], signal.SIGUSR1, "raise")
            case "crash at the end":
                self._end(some[:1], signal.SIGUSR2, "crash at the end")
            case "stop":
                self._stop(some[:1], fault.lasts_s)
            case "stop all":
                self._stop(some, fault.lasts_s)
            case "replacements fail":
                for number in range(min(1 + int(fault.choice * 2), self._left_to_fail - 1)):
                    (self._folder / f"fails-{time.monotonic_ns()}-{number}").touch()
                    self._left_to_fail -= 1
                self._end(some[:1], signal.SIGKILL, "kill")
            case "newcomer":
                if len(self._own) < MOST_BY_HAND:
                    self._start_by_hand()
            case _:
                self._disturb(fault)

    def _here(self) -> list[int]:
        """The processes that run and were not told to end, in the order of their start."""
        found = []
        for pid in self._latest:
            with contextlib.suppress(psutil.NoSuchProcess):
                if pid not in self._gone and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
        return found

    def _end(self, pids: list[int], number: signal.Signals, how: str) -> None:
        for pid in pids[: self._left_to_fail]:
            self._left_to_fail -= 1
            self._write("faulted", whom=pid, how=how)  # before: what it does then is not to come first
            self.tell(f"{pid}: {how}")
            self._gone.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _stop(self, pids: list[int], seconds: float) -> None:
        def go_on() -> None:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self.tell(f"{pids} go on")

        self.tell(f"{pids} are stopped for {seconds:g} s")
        for pid in pids:
            self._write("stopped", whom=pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        self._later(seconds, go_on)

    def _disturb(self, fault: Fault) -> None:
        """What processes depend on."""
        chosen = int(fault.choice * 2)
        match self.kind, fault.what:
            case "agents", "restart the coordinator":
                self._coordinator.kill()
                self._start_later(fault.lasts_s / 3, self._coordinator.start)
            case "agents", "restart an agent":
                host = ("h1", "h2")[chosen]
                agent = self._agents.processes[host]
                if agent.poll() is None:
                    agent.kill()
                    agent.communicate()
                    self._later(fault.lasts_s / 3, lambda: self._agents.add(host) and None)
            case "agents", "stop an agent":
                agent = self._agents.processes[("h1", "h2")[chosen]]
                if agent.poll() is None:
                    agent.send_signal(signal.SIGSTOP)
                    self._later(fault.lasts_s, lambda: agent.send_signal(signal.SIGCONT))
            case "hand", "restart the coordinator":
                self._replicas[chosen].kill()
                self._start_later(fault.lasts_s / 3, self._replicas[chosen].start)
            case "hand", "stop a coordinator":
                process = self._replicas[chosen].process
                process.send_signal(signal.SIGSTOP)
                self._later(fault.lasts_s, lambda: process.send_signal(signal.SIGCONT))
            case "hand", "restart etcd":
                self._etcd.kill(0)
                self._later(fault.lasts_s / 3, lambda: self._etcd.start(0) and None)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _note_the_end(self) -> None:
        if self._launcher is not None and (code := self._launcher.poll()) is not None:
            said = (self._folder / "said").read_text(errors="replace")
            self._write("over", code=code, said=said)
            self.tell(f"the launcher ends with {code}")
        descriptors = {pid: os.pidfd_open(pid) for pid in self._left()}
        limit_s = time.monotonic() + LEFT_S
        try:
            while descriptors and (rest_s := limit_s - time.monotonic()) > 0:
                for ended in select.select([*descriptors.values()], [], [], rest_s)[0]:
                    pid = next(pid for pid, descriptor in descriptors.items() if descriptor == ended)
                    os.close(descriptors.pop(pid))
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        self._write("runs", still=[f"{pid}: {command}" for pid, command in self._left().items()])

    def _left(self) -> dict[int, str]:
        """What runs of this run: its process ids, with their commands."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == str(self._folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline())[:120]
        return found

    def _end_all(self) -> None:
        for pid in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in [*self._own.values(), *([self._launcher] if self._launcher else [])]:
            process.wait(60)
        # Agents and coordinators that are stopped would not hear of the end.
        for _, act in self._due:
            if act != self._start_by_hand:
                with contextlib.suppress(Exception):
                    act()


def play(folder: Path, kind: str, seed: int) -> None:
    """Raises AssertionError, with the story, if a rule is broken."""
    run = RandomRun(folder, kind, seed)
    broken = run.play()
    assert not broken, "\n".join([*run.story, *map(str, broken)])
    print(*run.story, sep="\n")
