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
