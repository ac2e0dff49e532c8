"""Whether all ranks broadcast several models in the same order.

The parameters of two models of one class have equal names. Ranks that broadcast them in different orders would give one
model the values of the other, without a word. Models have nothing by which ranks know them, so each rank remembers from
which lines of its script it has broadcast values of these names. Before each broadcast, ranks compare a digest of the
line. Different lines alone are no error: `if hvd.rank() == 0:` may stand around them. But if two ranks have
both been at both lines, and are at different ones now, their orders differ. That is found at the latest in the
last of these broadcasts, before anything is trained.

Not seen are loops that go through other models on each rank, at one line.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from horovod.base.errors import TrainingCode, coded
from horovod.common.ops.objects import allgather_object
from horovod.common.ops.specs import set_size
from horovod.common.ops.step_words import Digests
from horovod.common.process_sets import ProcessSet
from horovod.common.same_weights import Exchange
from horovod.common.script import lines_of_the_script
from horovod.worker.runtime.context import Context, current, is_member


class _Calls:
    """Of this process in a world."""

    def __init__(self, world: Context) -> None:
        self.world = weakref.ref(world)
        # How often these names were broadcast at each line.
        self.by_names: dict[tuple[int | None, int], dict[str, int]] = {}


class Line(NamedTuple):
    """What ranks tell each other."""

    names: int  # a digest of the names that are broadcast
    place: str  # the line, with how often it has run
    before: list[str]  # the places where values of these names were broadcast


_calls: _Calls | None = None


def check_broadcast(function: str, names: Iterable[str], process_set: ProcessSet) -> None:
    """All ranks of the process set call it before they broadcast values of these names.

    function: of the public interface, which the script has called.
    ValueError, on all ranks: they broadcast several models of these names in different orders.
    HorovodInternalError: a rank was lost.
    """
    if not is_member() or not process_set.included() or set_size(process_set) == 1:
        return
    known, digest = _known(names, process_set)
    site = lines_of_the_script()
    before = [_place(one, time) for one, times in known.items() for time in range(1, times + 1)]
    known[site] = known.get(site, 0) + 1
    own = Line(digest, _place(site, known[site]), before)
    exchange = Exchange(f"{function}.order", process_set)
    exchange.say(zlib.crc32(f"{own.names} {own.place}".encode()))
    if exchange.hear().digests is Digests.DIFFERENT:
        lines = allgather_object(own, exchange.wire, process_set)
        check_lines(function, dict(zip(process_set.ranks or range(len(lines)), lines, strict=True)))


def check_lines(function: str, lines: Mapping[int, Line]) -> None:
    """ValueError if two ranks have been at both lines, and are at different ones. lines: by rank."""
    for rank, mine in lines.items():
        for other, its in lines.items():
            if mine.names == its.names and mine.place in its.before and its.place in mine.before:
                raise ValueError(
                    coded(
                        TrainingCode.DIFFERENT_ORDER,
                        f"{function}: the ranks broadcast several models with equal parameter names in "
                        f"different orders, so some ranks now have the values of another model. Rank {rank} is "
                        f"at {mine.place}, which rank {other} has passed already; rank {other} is at "
                        f"{its.place}. Broadcast the models in the same order on all ranks.",
                    )
                )


def _known(names: Iterable[str], process_set: ProcessSet) -> tuple[dict[str, int], int]:
    global _calls
    world = current()
    if _calls is None or _calls.world() is not world:
        _calls = _Calls(world)
    digest = zlib.crc32("\n".join(names).encode())
    return _calls.by_names.setdefault((process_set.process_set_id, digest), {}), digest


def _place(site: str, time: int) -> str:
    return site if time == 1 else f"{site} (time {time})"
