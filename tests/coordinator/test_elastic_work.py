"""That no committed work of an elastic job is lost or done again without a word, as stories (stories/work/*.txt).

    job fewest=1 most=3 patience=60   begins a story; `anew`: its processes may begin anew
    come a b                          these processes join, one after the other; as members of their world if they can
    begun a b                         the same, and a launcher has started them
    sync                              the members of the running world have made their state equal
    commit a b                        they commit, for the first time in this world
    done a                            its elastic function has returned
    begins a                          it has begun another one
    go a                              it leaves its world to join the next one
    leave a, fail a                   it leaves for good: after its work, or with an error
    kill a                            it is lost, and its process is seen to end
    lose a                            it is lost, and nobody has seen its process end
    ended a                           its agent says that its process has ended
    well a                            its agent says that its process has ended with exit code 0
    replace a b                       the launcher starts b in the place of a, and b joins
    pass 30                           so many seconds pass
    takeover                          another coordinator goes on from what the store has
    rest 1000                         the same, and for so many seconds no process of the job was there

Each line after `----` is a world with its members by rank (`*` marks those whose state does not count), a process that
is refused, or that now waits for one that holds the state. A report of a bug can be pasted in.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator_builders import request
from membership_story import SECRET
from test_elastic_stories import blocks
from test_elastic_worlds import Elastic

from horovod.base.errors import code_of
from horovod.coordinator.core.ending import RankEnded
from horovod.coordinator.core.world.life import Present
from horovod.coordinator.core.world.membership import Membership
from horovod.coordinator.core.world.work import WORD_S, JobWork, Lost, Waits
from horovod.protos.v1 import membership_pb2 as pb

STORIES = sorted((Path(__file__).parent / "stories" / "work").glob("*.txt"))


class Work(Elastic):
    """Each process holds what it would say in its request: how many commits, of which epoch."""

    def __init__(self, given: dict[str, str], begins_anew: bool) -> None:
        super().__init__(int(given["fewest"]), int(given["most"]))
        self._fields = {"begins_anew": begins_anew, "patience_s": float(given.get("patience", 60))}
        self._state: dict[str, tuple[int, int]] = {}
        self._started: dict[str, tuple[int, int]] = {}  # rank and incarnation, of those that a launcher has started
        self._heard: dict[str, int] = {}  # member -> how many of its events are told
        self._worlds = 0
        self._waits: dict[str, str] = {}
        self._lines: list[str] = []

    def tell(self, commands: list[str]) -> list[str]:
        self._lines = []
        for command in commands:
            word, *names = command.split()
            if word == "pass":
                self.pass_time(float(names[0]))
            elif word == "sync":
                self._sync()
            elif word == "takeover":
                self._take_over()
            elif word == "rest":
                self._take_over(float(names[0]))
            elif word == "replace":
                old = self._started.get(names[0], (self._rank(names[0]), 0))
                self._started[names[1]] = old[0], old[1] + 1
                self._come(names[1])
            else:
                for name in names:
                    getattr(self, f"_{word}")(name)
            self._listen()
        return self._lines

    def _rank(self, name: str) -> int:
        return [one.member_id for one in self.world(self.member(name)).members].index(self.member(name))

    def _come(self, name: str) -> None:
        fields = dict(self._fields)
        if name in self._started:
            fields["rank"], fields["incarnation"] = self._started[name]
        if refusal := self.come(name, state=self._state.get(name, (0, 0)), **fields):
            self._lines.append(f"{name} is refused: {code_of(refusal)}")

    def _begun(self, name: str) -> None:
        self._started[name] = len(self._started), 1
        self._come(name)

    def _sync(self) -> None:
        world = self.formations[-1].world(self.epoch, SECRET)
        names = [one.member_id[0] for one in world.members]
        commits = max(self._state.get(name, (0, 0))[0] for name in names)
        self._state.update(dict.fromkeys(names, (max(commits, int(world.has_commits)), self.epoch)))

    def _say(self, name: str, **work: bool) -> None:
        told = pb.MemberMessage(work=pb.Work(epoch=self.world(self.member(name)).epoch, **work))
        self.take(self.membership.reported(self.member(name), told, self.now_s))

    def _commit(self, name: str) -> None:
        commits, epoch = self._state[name]
        self._state[name] = commits + 1, epoch
        self._say(name, committed=True)

    def _done(self, name: str) -> None:
        self._say(name, done=True)

    def _begins(self, name: str) -> None:
        self._say(name, done=False)

    def _go(self, name: str) -> None:
        self.go(name)

    def _leave(self, name: str) -> None:
        self.leave(self.member(name))

    def _fail(self, name: str) -> None:
        self.leave(self.member(name), failed=True)

    def _kill(self, name: str) -> None:
        self.take(self.membership.process_ended(self.member(name), "its process ended", self.now_s))
        self.disconnect(self.member(name))

    def _lose(self, name: str) -> None:
        self.lose(self.member(name), "its process is stopped")

    def _ended(self, name: str) -> None:
        ended = RankEnded("digits", 99, "node-a", sum(name.encode()), "it was killed", incarnation=99)
        self.take(self.membership.rank_ended(ended, self.now_s))

    def _well(self, name: str) -> None:
        ended = RankEnded("digits", 99, "node-a", sum(name.encode()), "exit code 0", incarnation=99, well=True)
        self.take(self.membership.rank_ended(ended, self.now_s))

    def _take_over(self, rested_s: float = 0.0) -> None:
        membership, self.membership = self.membership, Membership()
        gone, kept = membership.gone("digits"), membership.kept("digits")
        if gone is not None:
            self.membership.restore(self.formations[-1].record(self.epoch, SECRET), gone, self.now_s)
        elif kept is not None:
            self.membership.restore(kept, pb.GoneRecord(epoch=self.epoch), self.now_s, rested_s)

    def _listen(self) -> None:
        if self.epoch > self._worlds:
            self._worlds = self.epoch
            world = self.formations[-1].world(self.epoch, SECRET)
            marked = [f"{one.member_id[0]}{'*' * (rank in world.newcomers)}" for rank, one in enumerate(world.members)]
            self._lines.append(f"world {self.epoch}: {' '.join(marked)}{', anew' if world.notice else ''}")
        for member, events in self.told.items():
            name = member[0]
            for event in events[self._heard.get(member, 0) :]:
                if event.HasField("refused") and "declared lost" not in event.refused.sentence:
                    self._lines.append(f"{name} is refused: {code_of(event.refused.sentence)}")
                if event.HasField("progress"):
                    waits = event.progress.sentence.partition("; waiting up to ")[2]
                    if waits and self._waits.get(member) != waits:
                        assert event.progress.parked  # it has no deadline of its own
                        self._lines.append(f"{name} waits: {waits.partition('(pid')[0].strip()}")
                    self._waits[member] = waits
            self._heard[member] = len(events)


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    story: Work | None = None
    for commands, expected in blocks(path.read_text()):
        if commands[0].startswith("job "):
            words = commands.pop(0).split()[1:]
            story = Work(dict(word.split("=") for word in words if "=" in word), "anew" in words)
        assert story is not None, "A story begins with a job."
        assert story.tell(commands) == expected, commands


# What no story tells: whom a job waits for, and for how long. Process a was rank 0 of epoch 1, in which it committed.
A = Present(0, request("a", pid=7, host="node-a", rank=0, incarnation=1))
NEWCOMERS = [request("b", patience_s=60.0)]


def committed() -> JobWork:
    work = JobWork()
    work.told(pb.Work(epoch=1, committed=True))
    return work


@pytest.mark.parametrize(("pid", "host"), [(8, "node-a"), (7, "node-b")])
def test_another_process_is_not_the_one_that_is_awaited(pid: int, host: str) -> None:
    work = committed()
    work.lost(A, "it is silent", may_live=True)
    assert not work.ended(RankEnded("digits", 5, host, pid, "it ended"))
    work.joins(request("c", pid=pid, host=host))
    assert isinstance(work.verdict("digits", NEWCOMERS, 0.0), Waits)


def test_nobody_waits_for_a_process_that_is_here_or_for_word_on_it() -> None:
    work = committed()
    work.lost(A, "it is silent", may_live=True)
    work.joins(request("c", pid=7, host="node-a"))
    assert not work.is_awaited(RankEnded("digits", 0, "node-a", 7, "it ended"))
    assert isinstance(work.verdict("digits", NEWCOMERS, 0.0), Lost)


def test_the_state_of_an_earlier_world_is_not_awaited() -> None:
    work = committed()
    work.lost(A, "it is silent", may_live=True)
    work.told(pb.Work(epoch=2, committed=True))
    assert isinstance(work.verdict("digits", NEWCOMERS, 0.0), Lost)


def test_nor_is_word_on_who_was_in_a_training_that_has_begun_anew() -> None:
    work = committed()
    work.lost(A, "it ended", may_live=False)
    work.begins_anew(2)
    assert not work.is_awaited(RankEnded("digits", 0, "node-a", 7, "it ended"))
    work.told(pb.Work(epoch=2, committed=True))
    assert isinstance(work.verdict("digits", NEWCOMERS, 0.0), Lost)


def test_the_wait_is_as_long_as_patience_and_begins_with_the_first_look() -> None:
    work = committed()
    work.restart_limits(0.0)  # nobody waits yet
    work.lost(A, "it is silent", may_live=True)
    assert isinstance(work.verdict("digits", NEWCOMERS, 100.0), Waits)
    assert isinstance(work.verdict("digits", NEWCOMERS, 159.0), Waits)
    assert isinstance(work.verdict("digits", NEWCOMERS, 160.0), Lost)


def test_a_wait_begins_anew_when_the_coordinator_was_stopped() -> None:
    work = committed()
    work.lost(A, "it is silent", may_live=True)
    assert isinstance(work.verdict("digits", NEWCOMERS, 100.0), Waits)
    work.restart_limits(150.0)
    assert isinstance(work.verdict("digits", NEWCOMERS, 209.0), Waits)
    assert isinstance(work.verdict("digits", NEWCOMERS, 210.0), Lost)


def test_word_on_how_a_process_ended_is_awaited_for_a_while() -> None:
    work = committed()
    work.lost(A, "it ended", may_live=False)
    assert isinstance(work.verdict("digits", NEWCOMERS, 100.0), Waits)
    assert isinstance(work.verdict("digits", NEWCOMERS, 100.0 + WORD_S), Lost)


def test_the_last_loss_is_known_after_a_takeover_although_later_records_have_none() -> None:
    found = JobWork.restored(pb.JobWork(last_loss="rank 1 was killed"), pb.JobWork(committed_epoch=3))
    assert (found.last_loss, found.committed_epoch) == ("rank 1 was killed", 3)
    assert JobWork.restored(pb.JobWork(last_loss="first"), pb.JobWork(last_loss="second")).last_loss == "second"
