"""Which slots elastic jobs are to give back, so that a job which waits for room can begin.

A job that runs has for itself what it asked for when it was submitted (JobSpec.processes). What it has beyond that was
lent to it while nobody else wanted it, and goes to the job that waits first: the youngest job gives first, and of its
slots the last ones. Nothing is taken back where all of it together would not do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .placement import Capacity, Resources, place, processes_that_fit


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
