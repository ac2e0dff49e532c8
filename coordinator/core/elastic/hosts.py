"""Which of the hosts that are found for an elastic job it may use, in which order, and which are set aside.

    a host is new                  it goes behind those that are there, which keep their places
    it is not found any more       it goes; if it comes back, it is new
    it has other slots             it keeps its place
    it fails, or a process there   it is set aside: for good, or for a cooldown that grows with each failure
    its cooldown is over           it is used again, behind the others, since nothing of the job is left on it
    all that are found are aside   the job ends

The places matter because survivors of a world keep their order: the hosts that have been there longest hold the low
ranks.

Pure: the time, in seconds of any clock, and chance are arguments, and each answer comes with its sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from horovod.base.errors import ClusterCode, coded
from horovod.base.words import capitalized, joined, plural, shortened


@dataclass(frozen=True)
class Cooldown:
    """Seconds, at least and at most."""

    least_s: float
    most_s: float

    def delay_s(self, times: int, chance: float) -> float:
        """Doubles with each time before this one that the host was lost. chance: from 0 to 1, so that hosts which were
        lost together do not come back together.
        """
        doubled = self.least_s * 2.0 ** min(times, 64)
        return min(self.most_s, max(self.least_s, doubled + chance * self.least_s))


_SHOWN = 4


@dataclass(frozen=True)
class Hosts:
    """The hosts of one job, as known now. Also a host that is not found at the moment may be set aside."""

    cooldown: Cooldown | None = None  # None: a host is set aside for good
    found: Mapping[str, int] = field(default_factory=dict)  # host -> slots, in the order of places
    aside: Mapping[str, float | None] = field(default_factory=dict)  # host -> until when; None: for good
    failures: Mapping[str, int] = field(default_factory=dict)  # host -> how often it was set aside

    @property
    def usable(self) -> Mapping[str, int]:
        """The slots of the hosts that the job may use, in the order of places."""
        return {name: slots for name, slots in self.found.items() if name not in self.aside}


@dataclass(frozen=True)
class Change:
    """What became different for the job from one look at its hosts to the next."""

    more: bool = False  # a host came, came back from its cooldown, or has more slots
    fewer: bool = False  # a host went, or has fewer slots

    def __bool__(self) -> bool:
        return self.more or self.fewer


def in_places(found: Sequence[str], before: Sequence[str]) -> list[str]:
    """The hosts that are found, those that were there before first, in their order of then."""
    old = [name for name in before if name in set(found)]
    return [*old, *(name for name in found if name not in set(before))]


def look(now_s: float, hosts: Hosts, found: Mapping[str, int] | None) -> tuple[Hosts, Change, str]:
    """The hosts as they are now. found: host -> slots; None: the source has failed, so its last answer counts."""
    given = hosts.found if found is None else {name: slots for name, slots in found.items() if slots > 0}
    back = [name for name, until_s in hosts.aside.items() if until_s is not None and now_s >= until_s]
    aside = {name: until_s for name, until_s in hosts.aside.items() if name not in back}
    places = in_places(list(given), [name for name in hosts.found if name not in back])
    new = replace(hosts, found={name: given[name] for name in places}, aside=aside)
    was, now = hosts.usable, new.usable
    came = [name for name in now if name not in was]
    went = [name for name in was if name not in now]
    others = {name: (was[name], slots) for name, slots in now.items() if was.get(name, slots) != slots}
    more = bool(came) or any(slots > before for before, slots in others.values())
    fewer = bool(went) or any(slots < before for before, slots in others.values())
    return new, Change(more, fewer), _told(new, came, went, others, [name for name in back if name in now])


def set_aside(
    now_s: float, hosts: Hosts, name: str, chance: float, why: str = "a process failed there"
) -> tuple[Hosts, str]:
    """The host has failed. chance: a random number from 0 to 1, used where there is a cooldown."""
    if name in hosts.aside:
        return hosts, ""
    failures = hosts.failures.get(name, 0)
    until_s: float | None = None
    how_long = "for good"
    if hosts.cooldown is not None:
        delay_s = hosts.cooldown.delay_s(failures, chance)
        until_s, how_long = now_s + delay_s, f"for {delay_s:.3g} s"
    new = replace(hosts, aside={**hosts.aside, name: until_s}, failures={**hosts.failures, name: failures + 1})
    often = f", for the {_ordinal(failures + 1)} time" if failures else ""
    return new, f"Host {name} is set aside {how_long}, because {why}{often}."


def ending(hosts: Hosts) -> str:
    """Why the job ends, with a code, where none of the hosts that are found may be used; "" where it goes on.

    Also where a cooldown would give one of them back: no process is left that has the state of the training.
    """
    if hosts.usable or not set(hosts.found) & set(hosts.aside):
        return ""
    names = shortened(list(hosts.found), _SHOWN)
    sentence = f"Each host of the job has failed ({names}), so nothing is left to go on from: the job ends."
    return coded(ClusterCode.TOO_FEW_PROCESSES, sentence)


def _told(
    hosts: Hosts, came: Sequence[str], went: Sequence[str], others: Mapping[str, tuple[int, int]], back: Sequence[str]
) -> str:
    parts = []
    if new := [f"{name} with {plural(hosts.found[name], 'slot')}" for name in came if name not in back]:
        parts.append(f"{_hosts(new)} came")
    if back:
        parts.append(f"{_hosts(list(back))} may be used again after a cooldown")
    if went:
        parts.append(f"{_hosts(list(went))} went")
    parts += [f"host {name} has {plural(now, 'slot')} instead of {was}" for name, (was, now) in others.items()]
    text = joined(parts)
    return f"{capitalized(text)}." if text else ""


def _hosts(names: Sequence[str]) -> str:
    return f"{'host' if len(names) == 1 else 'hosts'} {shortened(names, _SHOWN)}"


def _ordinal(number: int) -> str:
    """`2nd`, `3rd`, `11th`."""
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 10 <= number % 100 <= 20 else suffix}"
