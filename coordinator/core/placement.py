"""Where the processes of a job go: packed on few hosts, host by host, and only where there is room for all they need.

A job that names its hosts gets them in that order, as with `horovodrun -H`. Any other job goes to as few hosts as hold
it: if one host has room for all that is left, the fullest such host, else the host with the most room, and so on. Ranks
are then dealt out host by host in the order of the hosts' names, so that neighbours in rank are neighbours in memory.

Pure: what is free is an argument, and the answer is a placement or the sentence why there is none.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .words import plural, shortened

SHOWN_HOSTS = 4


@dataclass(frozen=True)
class Room:
    """What one host has for jobs: now, or when it runs nothing."""

    name: str
    slots: int
    gpus: tuple[str, ...] = ()
    cpus: float = math.inf
    memory_bytes: float = math.inf
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wish:
    """What a job asks for; `gpus`, `cpus` and `memory_bytes` for each process."""

    processes: int
    gpus: int = 0
    cpus: float = 0.0
    memory_bytes: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[tuple[str, int], ...] = ()  # with the slots that may be used there; empty: any host
    together: int = 1  # processes of a worker, which run on one host
    worker_slots: int = 0  # that a worker takes; 0: as many as it has processes

    @property
    def slots_together(self) -> int:
        return self.worker_slots or self.together

    def __str__(self) -> str:
        if self.together > 1 or self.worker_slots > 1:
            return self._of_workers()
        each = []
        if self.gpus:
            each.append(plural(self.gpus, "GPU"))
        if self.cpus:
            each.append(f"{self.cpus:g} CPUs")
        if self.memory_bytes:
            each.append(f"{self.memory_bytes / 2**30:.3g} GiB of memory")
        return self._with(plural(self.processes, "slot"), each)

    def _of_workers(self) -> str:
        each = [plural(self.slots_together, "slot")]
        if self.gpus:
            each.append(plural(self.gpus * self.together, "GPU"))
        if self.cpus:
            each.append(f"{self.cpus * self.together:g} CPUs")
        if self.memory_bytes:
            each.append(f"{self.memory_bytes * self.together / 2**30:.3g} GiB of memory")
        return self._with(plural(self.processes // self.together, "worker"), each)

    def _with(self, words: str, each: Sequence[str]) -> str:
        if each:
            words += f" with {', '.join(each)} each"
        if self.labels:
            words += " on hosts with " + ", ".join(f"{key}={value}" for key, value in sorted(self.labels.items()))
        return words


@dataclass(frozen=True)
class Part:
    """Ranks `first_rank` to `first_rank + count - 1` run on `host`."""

    host: str
    first_rank: int
    count: int
    gpus: tuple[str, ...] = ()


def place(wish: Wish, rooms: Sequence[Room]) -> tuple[Part, ...] | str:
    """The parts in rank order, or why the rooms do not hold the job."""
    if wish.hosts:
        return _in_order(wish, {room.name: room for room in rooms})
    capacity = {room.name: _capacity(wish, room) for room in rooms}
    by_name = {room.name: room for room in rooms}
    counts: dict[str, int] = {}
    left = wish.processes
    while left:
        able = [name for name, most in capacity.items() if most and name not in counts]
        if not able:
            return _too_little(wish, rooms, sum(capacity.values()))
        whole = [name for name in able if capacity[name] >= left]
        if whole:
            chosen = min(whole, key=lambda name: (capacity[name], natural(name)))
        else:
            chosen = min(able, key=lambda name: (-capacity[name], natural(name)))
        counts[chosen] = min(left, capacity[chosen])
        left -= counts[chosen]
    return _dealt(wish, by_name, [(name, counts[name]) for name in sorted(counts, key=natural)])


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """A key that sorts node9 before node10."""
    return tuple((text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name))


def _in_order(wish: Wish, by_name: Mapping[str, Room]) -> tuple[Part, ...] | str:
    counts = []
    left, total = wish.processes, 0
    for name, slots in wish.hosts:
        room = by_name.get(name)
        if room is None:
            return f"it is to run on host {name}, whose agent is not there."
        most = min(slots // wish.slots_together * wish.together, _capacity(wish, room))
        total += most
        if (count := min(left, most)) > 0:
            counts.append((name, count))
            left -= count
    if left:
        return _too_little(wish, [by_name[name] for name, _ in wish.hosts], total)
    return _dealt(wish, by_name, counts)


def _dealt(wish: Wish, by_name: Mapping[str, Room], counts: Sequence[tuple[str, int]]) -> tuple[Part, ...]:
    parts, first = [], 0
    for name, count in counts:
        parts.append(Part(name, first, count, by_name[name].gpus[: count * wish.gpus]))
        first += count
    return tuple(parts)


def _capacity(wish: Wish, room: Room) -> int:
    """How many processes fit there: those of whole workers."""
    if any(room.labels.get(key) != value for key, value in wish.labels.items()):
        return 0
    workers = float(room.slots // wish.slots_together)
    if wish.gpus:
        workers = min(workers, len(room.gpus) // (wish.gpus * wish.together))
    if wish.cpus:
        workers = min(workers, room.cpus / (wish.cpus * wish.together) + 1e-9)
    if wish.memory_bytes:
        workers = min(workers, room.memory_bytes / (wish.memory_bytes * wish.together))
    return max(0, int(workers)) * wish.together


def _too_little(wish: Wish, rooms: Sequence[Room], total: int) -> str:
    in_order = sorted(rooms, key=lambda room: natural(room.name))
    shown = [f"{room.name}:{_capacity(wish, room) // wish.together}" for room in in_order]
    where = f" ({shortened(shown, SHOWN_HOSTS)})" if shown else ""
    return f"it asks for {wish}, and there is room for {total // wish.together} on {plural(len(rooms), 'host')}{where}."
