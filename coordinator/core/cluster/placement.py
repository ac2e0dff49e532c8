"""Where the processes of a job go: packed on few hosts, host by host, and only where there is room for all they need.

A job that names its hosts gets them in that order, as with `horovodrun -H`. Any other job goes to as few hosts as hold
it: if one host has room for all that is left, the fullest such host, else the host with the most room, and so on. Ranks
are then dealt out host by host in the order of the hosts' names, so that neighbours in rank are neighbours in memory.

Pure: what is free is an argument, and the answer is a placement or the sentence why there is none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from horovod.base.words import plural, shortened

SHOWN_HOSTS = 4


@dataclass(frozen=True)
class Capacity:
    """Slots, GPUs, CPUs and memory of a host: those that are free now, or all that it has."""

    name: str
    slots: int
    gpus: tuple[str, ...] = ()
    cpus: float = math.inf
    memory_bytes: float = math.inf
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Resources:
    """What a job asks for: `gpus`, `cpus` and `memory_bytes` for each process."""

    processes: int
    gpus: int = 0
    cpus: float = 0.0
    memory_bytes: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[tuple[str, int], ...] = ()  # (host, slots that may be used there); empty: any host
    together: int = 1  # processes of each worker; they run on one host
    worker_slots: int = 0  # slots that each worker takes; 0: as many as it has processes

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


def place(wanted: Resources, hosts: Sequence[Capacity]) -> tuple[Part, ...] | str:
    """The parts in rank order, or why the hosts can't hold the job."""
    if wanted.hosts:
        return _in_order(wanted, {host.name: host for host in hosts})
    fitting = {host.name: processes_that_fit(wanted, host) for host in hosts}
    by_name = {host.name: host for host in hosts}
    counts: dict[str, int] = {}
    left = wanted.processes
    while left:
        able = [name for name, most in fitting.items() if most and name not in counts]
        if not able:
            return _too_little(wanted, hosts, sum(fitting.values()))
        whole = [name for name in able if fitting[name] >= left]
        if whole:
            chosen = min(whole, key=lambda name: (fitting[name], natural(name)))
        else:
            chosen = min(able, key=lambda name: (-fitting[name], natural(name)))
        counts[chosen] = min(left, fitting[chosen])
        left -= counts[chosen]
    return _dealt(wanted, by_name, [(name, counts[name]) for name in sorted(counts, key=natural)])


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """A key that sorts node9 before node10."""
    return tuple((text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name))


def _in_order(wanted: Resources, by_name: Mapping[str, Capacity]) -> tuple[Part, ...] | str:
    counts = []
    left, total = wanted.processes, 0
    for name, slots in wanted.hosts:
        host = by_name.get(name)
        if host is None:
            return f"it is to run on host {name}, whose agent is not there."
        most = min(slots // wanted.slots_together * wanted.together, processes_that_fit(wanted, host))
        total += most
        if (count := min(left, most)) > 0:
            counts.append((name, count))
            left -= count
    if left:
        return _too_little(wanted, [by_name[name] for name, _ in wanted.hosts], total)
    return _dealt(wanted, by_name, counts)


def _dealt(wanted: Resources, by_name: Mapping[str, Capacity], counts: Sequence[tuple[str, int]]) -> tuple[Part, ...]:
    parts, first = [], 0
    for name, count in counts:
        parts.append(Part(name, first, count, by_name[name].gpus[: count * wanted.gpus]))
        first += count
    return tuple(parts)


def processes_that_fit(wanted: Resources, host: Capacity) -> int:
    """How many processes of the job fit on the host. Workers are not divided between hosts."""
    if any(host.labels.get(key) != value for key, value in wanted.labels.items()):
        return 0
    workers = float(host.slots // wanted.slots_together)
    if wanted.gpus:
        workers = min(workers, len(host.gpus) // (wanted.gpus * wanted.together))
    if wanted.cpus:
        workers = min(workers, host.cpus / (wanted.cpus * wanted.together) + 1e-9)
    if wanted.memory_bytes:
        workers = min(workers, host.memory_bytes / (wanted.memory_bytes * wanted.together))
    return max(0, int(workers)) * wanted.together


def _too_little(wanted: Resources, hosts: Sequence[Capacity], total: int) -> str:
    in_order = sorted(hosts, key=lambda host: natural(host.name))
    shown = [f"{host.name}:{processes_that_fit(wanted, host) // wanted.together}" for host in in_order]
    where = f" ({shortened(shown, SHOWN_HOSTS)})" if shown else ""
    on_hosts = f"on {plural(len(hosts), 'host')}{where}"
    return f"it asks for {wanted}, and there is room for {total // wanted.together} {on_hosts}."


# Which slots elastic jobs are to give back, so that a job which waits for room can begin.
#
# A job that runs has for itself what it asked for when it was submitted (JobSpec.processes). What it has beyond that
# was lent to it while nobody else wanted it, and goes to the job that waits first: the youngest job gives first, and of
# its slots the last ones. Nothing is taken back where all of it together would not do.


@dataclass(frozen=True)
class Lent:
    """A slot that its job may lose, and what its host has more without the process."""

    job: str
    number: int
    frees: Capacity


def to_take_back(wanted: Resources, free: Sequence[Capacity], lent: Sequence[Lent]) -> Sequence[Lent]:
    """The first of `lent`, as many as are needed, and none on hosts that the job does not need.

    free: what there is without them. Empty where they are not needed, or not enough.
    """

    def is_enough(those: Sequence[Lent]) -> bool:
        return not isinstance(place(wanted, _with(free, those)), str)

    if not lent or is_enough([]) or not is_enough(lent):
        return []
    few, enough = 0, len(lent)
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if is_enough(lent[:middle]) else (middle, enough)
    chosen = list(lent[:enough])
    for host in dict.fromkeys(one.frees.name for one in chosen):
        elsewhere = [one for one in chosen if one.frees.name != host]
        if is_enough(elsewhere):
            chosen = elsewhere
    return chosen


def is_of_use(wanted: Resources, whole: Capacity) -> bool:
    """Whether the job that waits may run on that host, of which `whole` is all that it has."""
    is_named = not wanted.hosts or whole.name in dict(wanted.hosts)
    return is_named and processes_that_fit(wanted, whole) > 0


def _with(free: Sequence[Capacity], those: Sequence[Lent]) -> list[Capacity]:
    hosts = {host.name: host for host in free}
    for one in those:
        if (host := hosts.get(one.frees.name)) is not None:
            hosts[host.name] = together(host, one.frees)
    return list(hosts.values())


def together(host: Capacity, frees: Capacity) -> Capacity:
    return replace(
        host,
        slots=host.slots + frees.slots,
        gpus=(*host.gpus, *frees.gpus),
        cpus=host.cpus + frees.cpus,
        memory_bytes=host.memory_bytes + frees.memory_bytes,
    )
