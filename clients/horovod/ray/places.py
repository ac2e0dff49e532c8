"""Which rank each actor is, and on which host. Pure: all that is known is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from horovod.coordinator.core.ranks import Place, Seat, assign
from horovod.launch.host_names import host_names


@dataclass(frozen=True)
class Seated:
    """One rank: which actor it is, by its number in the order of starts, and its host."""

    actor: int
    host: str
    place: Place


def seated(nodes: Sequence[tuple[str, str]]) -> list[Seated]:
    """The ranks in their order: node by node, each in the order of its actors. nodes: of each actor, as above."""
    names = host_names(nodes)
    places = assign([Seat(str(number), names[node]) for number, (node, _) in enumerate(nodes)])
    assert not isinstance(places, str)  # nobody has asked for a rank
    return [Seated(int(place.member_id), names[nodes[int(place.member_id)][0]], place) for place in places]


def visible_gpus(of_ranks: Sequence[Sequence[str]]) -> list[str]:
    """The GPUs of all ranks of one host, so that the local rank indexes them: the first of each, then the others.

    >>> visible_gpus([["0", "1"], ["2", "3"]])
    ['0', '2', '1', '3']
    """
    return [gpu for turn in zip_longest(*of_ranks) for gpu in turn if gpu is not None]


def gpus_of_elastic(own: Sequence[str], others: Sequence[Sequence[str]], local_rank: int) -> list[str]:
    """The GPUs that a worker of an elastic job sees: those of its host that the job has now, so that its local rank is
    the number of its own. Workers that come later have others, so the lists of two workers differ.

    >>> gpus_of_elastic(["3"], [["0"], ["1"]], local_rank=1)
    ['0', '3', '1']
    """
    found = [gpu for gpu in visible_gpus(others) if gpu not in own]
    at = min(local_rank, len(found))
    return [*found[:at], *own, *found[at:]]
