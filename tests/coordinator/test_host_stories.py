"""Which hosts an elastic job may use, told as stories: commands, `----`, and what follows (stories/hosts/*.txt).

    hosts cooldown=10-60      a job's hosts, none of which is known yet; without a cooldown they are set aside for good
    at 12                     the time, in seconds
    found a:2 b:1             what was found, with slots
    unknown                   nobody could tell
    fails a chance=0.5        a process failed there

What follows: the usable hosts in the order of their places, those set aside, and sentences.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_elastic_stories import blocks

from horovod.coordinator.core.elastic.hosts import Cooldown, Hosts, ending, look, set_aside

STORIES = sorted((Path(__file__).parent / "stories" / "hosts").glob("*.txt"))


class Story:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.hosts = Hosts()

    def tell(self, commands: list[str]) -> list[str]:
        said = [line for command in commands for line in self._obey(command)]
        return [self._shown(), *said, *([f"ends: {why}"] if (why := ending(self.hosts)) else [])]

    def _obey(self, command: str) -> list[str]:
        word, *rest = command.split()
        given = dict(one.split("=") for one in rest if "=" in one)
        if word == "hosts":
            limits = [float(one) for one in given["cooldown"].split("-")] if given else []
            self.hosts = Hosts(Cooldown(*limits) if limits else None)
        elif word == "at":
            self.now_s = float(rest[0])
        elif word == "fails":
            self.hosts, sentence = set_aside(self.now_s, self.hosts, rest[0], float(given.get("chance", 0)))
            return [sentence] if sentence else []
        elif word in ("found", "unknown"):
            found = {name: int(slots) for name, slots in (one.split(":") for one in rest)}
            self.hosts, change, sentence = look(self.now_s, self.hosts, found if word == "found" else None)
            kinds = ", ".join(kind for kind in ("more", "fewer") if getattr(change, kind))
            assert bool(change) == bool(sentence)
            return [f"{kinds}: {sentence}"] if change else []
        else:
            raise ValueError(f"No command of a story: {command!r}")
        return []

    def _shown(self) -> str:
        usable = " ".join(f"{name}:{slots}" for name, slots in self.hosts.usable.items()) or "no host"
        until = lambda at_s: "for good" if at_s is None else f"until {at_s:g}"  # noqa: E731
        aside = ", ".join(f"{name} {until(at_s)}" for name, at_s in self.hosts.aside.items())
        return f"{usable}, aside: {aside}" if aside else usable


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    story = Story()
    for commands, expected in blocks(path.read_text()):
        assert story.tell(commands) == expected, commands


def test_there_are_stories() -> None:
    assert len(STORIES) >= 4


def test_a_cooldown_stays_within_its_limits_after_any_number_of_failures() -> None:
    assert [Cooldown(1, 3600).delay_s(failures, 1) for failures in (0, 3, 11, 10**6)] == [2, 9, 2049, 3600]
    assert Cooldown(5, 5).delay_s(0, 1) == 5
