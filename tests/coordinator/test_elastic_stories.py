"""What becomes of a job's target, told as stories: commands, `----`, and what follows from them (stories/*.txt).

    job fewest=2 most=4 on_failure=replace h1: 0 1, h2: 2   the rules (others: name=value) and the first target
    at 12                                                   the time, in seconds
    room h1 1, h2 2                                         further processes that hosts can have, from now on
    exit 1 failed: ended by signal 9                        how the process of a slot ended; 1.3: of its incarnation 3
    exit 1 early: ended with exit code 1                    soon after it was started
    exit 2 lost: its host was lost
    exit 2 drained: ended with exit code 143
    exit 3 follows: ended with exit code 1                  it gave up because another one had failed
    exit 3 after: ended by signal 11        the work was done then, and it was a member; unneeded: it was none
    exit 3 stateless: ended with exit code 79   it found that all that was committed is lost
    exit 0 well
    back 2 3                                                these slots are taken back
    stop                                                    a person asks for the end
    world none                                              no process has joined yet; world 2: the epoch of the latest
    well 0 2                                                these slots' processes have run for a while, from now on

One decision is made for all commands before `----`. A slot is shown with its incarnation unless that is the first, with
a minus if it is to leave, and with `at 12` if its next process is started then.
A report of a bug can be pasted in: what was seen becomes the commands, and what should have followed the rest.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from horovod.coordinator.core.elastic.decision import Exit, Observed, OnFailure, Phase, Rules, Slot, Target, decide

_SPELT = {"fewest", "most", "on_failure"}  # rules that every job has
STORIES = sorted((Path(__file__).parent / "stories").glob("*.txt"))


class Story:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.target: Target | None = None
        self.room: dict[str, int] = {}
        self.well: list[int] = []
        self.epoch: int | None = None
        self.joined = True

    def tell(self, commands: list[str]) -> list[str]:
        observed = Observed()
        began = False
        for command in commands:
            word, _, rest = command.partition(" ")
            if word == "job":
                self.target, began = _target(rest), True
            elif word == "at":
                self.now_s = float(rest)
            elif word == "room":
                self.room = {host: int(count) for host, count in (one.split() for one in rest.split(", ") if one)}
            elif word == "exit":
                observed = replace(observed, exits=(*observed.exits, self._exit(rest)))
            elif word == "back":
                observed = replace(observed, taken_back=[int(number) for number in rest.split()])
            elif word == "world":
                self.joined, self.epoch = rest != "none", 0 if rest == "none" else int(rest)
            elif word == "well":
                self.well = [int(number) for number in rest.split()]
            elif word == "stop":
                observed = replace(observed, stopped=True)
            else:
                raise ValueError(f"No command of a story: {command!r}")
        assert self.target is not None, "A story begins with a job."
        if began and len(commands) == 1:
            return [_shown(self.target)]
        before = self.target
        self.target, sentence = decide(self.now_s, before, self._with_what_lasts(observed))
        assert (self.target.generation > before.generation) == (self.target.slots != before.slots)
        return [_shown(self.target), *([sentence] if sentence else [])]

    def _with_what_lasts(self, observed: Observed) -> Observed:
        return replace(observed, room=self.room, well=self.well, joined=self.joined, epoch=self.epoch)

    def _exit(self, text: str) -> Exit:
        name, _, rest = text.partition(" ")
        number, _, incarnation = name.partition(".")
        end, _, how = rest.partition(": ")
        assert end in ("failed", "early", "follows", "lost", "drained", "well", "after", "unneeded", "stateless"), text
        return Exit(
            int(number),
            int(incarnation or 1),
            end != "well",
            how,
            end == "lost",
            end == "drained",
            end == "follows",
            end == "early",
            "exit code" in how,
            work_done=end in ("after", "unneeded"),
            unneeded=end == "unneeded",
            state_lost=end == "stateless",
        )


def _target(text: str) -> Target:
    words = text.split()
    given = dict(word.split("=") for word in words if "=" in word)
    places = " ".join(word for word in words if "=" not in word)
    slots = []
    for place in places.split(", "):
        host, _, numbers = place.partition(": ")
        slots += [Slot(int(number), host) for number in numbers.split()]
    most = given.get("replacements")
    rules = Rules(
        int(given["fewest"]),
        int(given["most"]),
        OnFailure(given["on_failure"]),
        int(most) if most else None,
        float(given.get("patience", 0)),
        since_progress=given.get("count") == "since_progress",
        **{
            rule.name: type(rule.default)(given[rule.name])
            for rule in fields(Rules)
            if rule.name in given and rule.name not in _SPELT
        },
    )
    return Target(rules, tuple(sorted(slots, key=lambda slot: slot.number)))


def _shown(target: Target) -> str:
    by_host: dict[str, list[str]] = {}
    for slot in target.slots:
        name = str(slot.number) if slot.incarnation == 1 else f"{slot.number}.{slot.incarnation}"
        name += "-" if slot.is_leaving else ""
        name += "" if slot.retry_at_s is None else f" (at {slot.retry_at_s:g})"
        by_host.setdefault(slot.host, []).append(name)
    where = ", ".join(f"{host}: {' '.join(numbers)}" for host, numbers in sorted(by_host.items()))
    short = f", short since {target.short_since_s:g} s" if target.short_since_s is not None else ""
    state = "" if target.phase is Phase.RUNS else f", {target.phase.value}"
    return f"generation {target.generation}{state}{short}: {where or 'no slots'}"


def blocks(text: str) -> list[tuple[list[str], list[str]]]:
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if lines:
            middle = lines.index("----")
            found.append((lines[:middle], lines[middle + 1 :]))
    return found


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    story = Story()
    for commands, expected in blocks(path.read_text()):
        assert story.tell(commands) == expected, commands


def test_there_are_stories() -> None:
    assert len(STORIES) >= 5
