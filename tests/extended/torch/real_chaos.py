"""A seeded schedule of what happens to an elastic training of real processes, and how it is carried out.

Ranks ask before they go on (chaos_rank.py). An event is due at a question: at a point of a certain step, or of the next
world's forming. So nothing here depends on how fast the machine is, but for which rank is the first to ask. A failure
tells all that was done, one line each.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chaos_rank import EPOCHS, FIRST_WEIGHTS
from chaos_reference import History
from chaos_site import TRAINING_HOSTS, ChaosSite, Rank, first_question
from committed_work import Record, check
from partitions import Partitions

# What else can happen beside kills, newcomers and takeovers, and what it means to a training today.
HANGS = True  # SIGSTOP: all wait for that rank, until it gets SIGCONT
CUTS = True  # a host is cut off: the ranks of the others go on without its ranks, which come back later
DRAINS = True  # SIGTERM: the process leaves at the next commit
EXPELS = True  # the others go on without a rank that is stopped for longer than HOROVOD_ELASTIC_HUNG_SECONDS
# A fault ends when others have a world without the rank, or when nobody has asked anything for so long.
HANG_QUIET_S = 15.0 if EXPELS else 0.3
CUT_QUIET_S = 15.0  # longer than it takes to notice

DEADLINE_S = 300.0  # of a whole training, which takes some seconds on a machine that has nothing else to do
MOST = 4
LAST_EVENT = 14  # of the steps; the shortest training has 18
LATE_STEPS = 4  # an event that is due in the next forming of a world happens at a step if none forms


@dataclass(frozen=True)
class Event:
    kind: str
    at: str  # the point: batch, backward, saved; or of a forming: joins, forms, reset
    step: int  # not before this one
    choice: float = 0.0  # among those to which it can happen
    waits: bool = True  # training goes on only when a newcomer is taken in; its commits are many meanwhile

    def __str__(self) -> str:
        return f"{self.kind} at {self.at!r} from step {self.step}{', awaited' if self.waits else ''}"


STEP_POINTS = ("batch", "backward", "saved")
FORMING_POINTS = ("joins", "forms", "reset")
SERVING = "kill the serving coordinator"
KINDS = {
    "kill": 5,
    "kill two": 2,
    "kill rank 0": 3,
    "newcomer": 8,
    SERVING: 2,
    "kill a node of etcd": 1,
    "hang": 1 if HANGS else 0,
    "cut": 1 if CUTS else 0,
    "drain": 2 if DRAINS else 0,
}


def schedule(dice: random.Random) -> list[Event]:
    steps = sorted(dice.randrange(LAST_EVENT) for _ in range(dice.randint(4, 7)))
    kinds = dice.choices(list(KINDS), list(KINDS.values()), k=len(steps))
    events = []
    for kind, step in zip(kinds, steps, strict=True):
        # Only after another event, the next world forms.
        points = FORMING_POINTS if events and dice.random() < 0.4 else STEP_POINTS
        events.append(Event(kind, dice.choice(points), step, dice.random(), dice.random() < 0.75))
    return events


@dataclass(frozen=True)
class Fault:
    """One that lasts. It ends as its comment above says."""

    quiet_s: float
    world: int  # the latest when it began
    affects: Callable[[Rank], bool]
    end: Callable[[], None]


class Chaos:
    def __init__(
        self, site: ChaosSite, job: str, size: int, batches_per_commit: int, events: Sequence[Event], seed: int = 0
    ) -> None:
        """size: the ranks at the beginning. seed: of the order of samples."""
        self._site = site
        self._job = job
        self._size = size
        self._batches_per_commit = batches_per_commit
        self._seed = seed
        self._events = list(events)
        self._ranks: list[Rank] = []
        self._history = History()
        self._log: list[Record] = []  # for the checker of all elastic runs
        self._done: list[dict[str, Any]] = []
        self._answers: dict[tuple[int, int, int], str] = {}  # to a question before a step, the same for all ranks
        self._awaited: Rank | None = None  # a newcomer
        self._epochs: set[int] = set()  # of the worlds in which a step has begun
        self._faults: list[Fault] = []
        self._host_cut_off = -1
        self._began_s = time.monotonic()
        planned = "; ".join(map(str, self._events))
        self.story = [f"{job}: {size} ranks, a commit every {batches_per_commit} steps; {planned}"]

    @classmethod
    def of(cls, site: ChaosSite, seed: int) -> Chaos:
        dice = random.Random(seed)
        return cls(site, f"chaos-{seed}", dice.randint(2, 3), dice.choice([1, 1, 2, 3]), schedule(dice), seed)

    def play(self) -> int:
        """How many steps there were."""
        try:
            for number in range(self._size):
                self._start(number % TRAINING_HOSTS)
            while left := [rank for rank in self._ranks if rank.exit_code is None]:
                self._listen(left)
            assert self._done, "nobody has ended the training"
            assert not self._events, f"it ended before {self._events[0]}"
            steps = self._history.check(self._done)
            self._write("test", "job", total=steps, min=1, anew=False)
            broken = check(self._log)
            assert not broken, "\n".join(map(str, broken))
            return steps
        except AssertionError as error:
            raise AssertionError("\n".join([*self.story, f"{type(error).__name__}: {error}", self._logs()])) from error
        finally:
            self._end_faults(lambda _: True)
            for rank in self._ranks:
                rank.end(signal.SIGKILL)

    def say(self, line: str) -> None:
        self.story.append(f"{time.monotonic() - self._began_s:7.3f}  {line}")

    def _logs(self) -> str:
        """What those said that did not end well."""
        ends = [rank for rank in self._ranks if not rank.is_killed and not (rank.is_done and rank.exit_code == 0)]
        said = [f"{rank.name}: {rank.log.read_text()[-3000:]}" for rank in ends]
        return "\n".join([*said, "The coordinators:", self._site.said(40)])

    def _start(self, host: int) -> Rank:
        is_first = len(self._ranks) < self._size
        environment = {
            "HOROVOD_SIZE": str(self._size),
            "HOROVOD_MIN_SIZE": "1",
            "HOROVOD_MAX_SIZE": str(MOST),
            "HOROVOD_ELASTIC_SETTLE_SECONDS": "0.05" if not is_first else "1",
            "BATCHES_PER_COMMIT": str(self._batches_per_commit),
            "SEED": str(self._seed),
            "WEIGHTS": str(FIRST_WEIGHTS if is_first else 1 + len(self._ranks)),
        }
        rank = self._site.start_rank(self._job, f"p{len(self._ranks)}", host, environment)
        self._ranks.append(rank)
        self.say(f"{rank.name} starts on host {host}")
        return rank

    def _write(self, who: str, what: str, **facts: Any) -> None:
        """A record for the checker."""
        self._log.append({"at": len(self._log), "who": who, "what": what, **facts})

    def _write_place(self, rank: Rank, what: str, asked: dict[str, Any]) -> None:
        self._write(rank.name, what, **{name: asked[name] for name in ("world", "rank", "size", "step")})

    # -- questions -----------------------------------------------------------------------------------------------------
    def _listen(self, left: list[Rank]) -> None:
        time_left_s = self._began_s + DEADLINE_S - time.monotonic()
        assert time_left_s > 0, f"{', '.join(rank.name for rank in left)} did not end in {DEADLINE_S:g} s"
        quiet_s = min((fault.quiet_s for fault in self._faults), default=time_left_s)
        asking = first_question(left, quiet_s)
        if not asking:
            self._end_faults(lambda fault: fault.quiet_s <= quiet_s)
        for rank in asking:
            asked = rank.question()
            if asked is None:
                self._ended(rank)
                continue
            self._note(rank, asked)
            if self._events and self._is_due(self._events[0], asked):
                event = self._events.pop(0)
                self.say(f"{rank.name} asks {_short(asked)}: {event.kind}")
                self._happen(event)
            rank.answer(self._answer(asked))

    def _end_faults(self, is_over: Callable[[Fault], bool]) -> None:
        for fault in [fault for fault in self._faults if is_over(fault)]:
            self._faults.remove(fault)
            fault.end()

    def _ended(self, rank: Rank) -> None:
        self.say(f"{rank.name} has ended with {rank.exit_code}")
        if rank is self._awaited:
            self._awaited = None
        self._write("test", "exit", whom=rank.name, code=rank.exit_code, said="")
        if not rank.is_killed:
            assert rank.exit_code == 0, f"{rank.name} ended with {rank.exit_code}"
            assert rank.is_done or self._done, f"{rank.name} ended before the training did"

    def _note(self, rank: Rank, asked: dict[str, Any]) -> None:
        match asked["at"]:
            case "batch":
                if asked["world"] != rank.world:
                    self.say(
                        f"{rank.name} is rank {asked['rank']} of {asked['size']} in epoch {asked['world']}, "
                        f"step {asked['step']}"
                    )
                    self._write_place(rank, "begins", asked)
                    self._epochs.add(asked["world"])
                    last = max((epoch for epoch in self._epochs if epoch < asked["world"]), default=0)
                    # What a rank has committed while the others went on without it does not count.
                    was_out = rank.world < last
                    assert was_out or asked["step"] >= rank.saved, f"the commit of step {rank.saved} is lost"
                    rank.saved = -1 if was_out else rank.saved
                    rank.world, rank.rank = asked["world"], asked["rank"]
                    self._end_faults(lambda fault: rank.world > fault.world and not fault.affects(rank))
                self._history.add(asked)
                if rank is self._awaited:
                    self._awaited = None
            case "saved":
                rank.saved = asked["step"]
                self._write_place(rank, "saves", asked)
            case "done":
                rank.is_done = True
                self._done.append(asked)
                self._write_place(rank, "returns", asked)

    def _is_due(self, event: Event, asked: dict[str, Any]) -> bool:
        if event.at in FORMING_POINTS:
            late = event.step + LATE_STEPS
            return asked["at"] == event.at or (asked["at"] == "batch" and asked["step"] >= late)
        return asked["at"] == event.at and asked["step"] >= event.step

    def _answer(self, asked: dict[str, Any]) -> str:
        if asked["at"] != "batch":
            return "go on"
        # Nobody is to come when the work is done: it would go on with that.
        absent = {one for one in self._ranks if one.lives and one.world < asked["world"]} - {*self._affected()}
        waits = bool(absent) if asked["epoch"] == EPOCHS - 1 else self._awaited is not None
        waits = waits and asked["size"] < MOST
        key = (asked["world"], asked["step"], asked["number"])
        return self._answers.setdefault(key, "commit" if waits else "go on")

    # -- events --------------------------------------------------------------------------------------------------------
    def _happen(self, event: Event) -> None:
        match event.kind:
            case "kill" | "kill two" | "kill rank 0" | "drain":
                count = 2 if event.kind == "kill two" else 1
                number = signal.SIGTERM if event.kind == "drain" else signal.SIGKILL
                for _ in range(count):
                    self._kill(self._victim(event), number)
            case "newcomer":
                newcomer = self._start(int(event.choice * TRAINING_HOSTS))
                if event.waits:
                    self._awaited = self._awaited or newcomer
            case kind if kind == SERVING:
                self.say(f"the coordinator at {self._site.kill_serving(self._job, self._host_cut_off)} is killed")
            case "kill a node of etcd":
                self._site.kill_node(int(event.choice * 3))
            case "hang":
                self._hang(self._victim(event))
            case "cut":
                self._cut(int(event.choice * TRAINING_HOSTS))

    def _hang(self, rank: Rank | None) -> None:
        if rank is None or any(fault.affects(rank) for fault in self._faults):
            return

        def go_on() -> None:
            self.say(f"{rank.name} goes on")
            rank.is_stopped = False
            rank.send_signal(signal.SIGCONT)

        self.say(f"{rank.name} is stopped")
        self._write("test", "stopped", whom=rank.name)
        rank.is_stopped = True
        rank.send_signal(signal.SIGSTOP)
        if rank is self._awaited:
            self._awaited = None
        self._faults.append(Fault(HANG_QUIET_S, self._latest(), lambda one: one is rank, go_on))

    def _cut(self, host: int) -> None:
        """Nothing gets from this host to another one, nor back."""
        if self._faults or all(rank.host == host for rank in self._with_state()):
            self.say("no host is cut off: only its ranks would have the state")
            return
        partitions = Partitions(self._site.network)

        def heal() -> None:
            self.say(f"host {host} is back")
            self._host_cut_off = -1
            partitions.heal()

        self.say(f"host {host} is cut off")
        self._host_cut_off = host
        for rank in self._ranks:
            if rank.host == host:
                self._write("test", "stopped", whom=rank.name)
        partitions.cut([host], {*range(TRAINING_HOSTS + 1)} - {host})
        if self._awaited is not None and self._awaited.host == host:
            self._awaited = None
        self._faults.append(Fault(CUT_QUIET_S, self._latest(), lambda one: one.host == host, heal))

    def _latest(self) -> int:
        """The epoch of the latest world."""
        return max(rank.world for rank in self._ranks)

    def _victim(self, event: Event) -> Rank | None:
        """None where nobody with the state would be left."""
        lives = [rank for rank in self._ranks if rank.lives and not rank.is_done]
        holders = [rank for rank in self._with_state() if rank not in self._affected()]
        if len(holders) == 1:
            lives.remove(holders[0])
        if event.kind == "kill rank 0":
            latest = max((rank.world for rank in lives), default=0)
            lives = [rank for rank in lives if rank.rank == 0 and rank.world == latest] or lives
        return lives[int(event.choice * len(lives))] if lives else None

    def _with_state(self) -> list[Rank]:
        """Those of the latest world: others may lack what it has committed, and a job ends when that is lost.

        Before the first world stands, those for whom it waits.
        """
        lives = [rank for rank in self._ranks if rank.lives and not rank.is_done]
        if latest := self._latest():
            return [rank for rank in lives if rank.world == latest]
        return [rank for rank in lives if rank in self._ranks[: self._size]]

    def _affected(self) -> list[Rank]:
        """By a fault that lasts."""
        return [rank for rank in self._ranks for fault in self._faults if fault.affects(rank)]

    def _kill(self, rank: Rank | None, number: int) -> None:
        if rank is None:
            self.say("nobody can be spared; a newcomer starts")
            newcomer = self._start(len(self._ranks) % TRAINING_HOSTS)
            self._awaited = self._awaited or newcomer
            return
        self.say(f"{rank.name} gets {signal.Signals(number).name}")
        self._write("test", "faulted", whom=rank.name, how=signal.Signals(number).name)
        rank.is_killed = True
        rank.send_signal(number)
        self._end_faults(lambda fault: rank.is_stopped and fault.affects(rank))


def _short(asked: dict[str, Any]) -> str:
    told = ", ".join(f"{name} {asked[name]}" for name in ("step", "world", "rank") if name in asked)
    return f"{asked['at']!r} ({told})" if told else repr(asked["at"])
