"""What ranks say of their unnamed operations, for errors and stall reports about one.

Unnamed operations match by their number, so one that only some ranks call shifts all later ones (ADR 4, ADR 96). How
many each rank has started, and at which line it stands, lead to the call that the others do not make.
"""

from collections.abc import Callable, Iterable

from horovod.base.errors import coded_like, without_code
from horovod.base.words import printable, values_by_rank

from .operations import is_unnamed
from .standing import MOST_KINDS, Operation, Standing

ADVICE = (
    "If only some ranks call one of them, HOROVOD_CHECK_CALL_SITES=1 shows the line. Operations with names (name=) "
    "can't be mixed up."
)
MAX_KINDS = 3  # kinds of operations that a sentence tells of
MAX_DIGITS = 20  # digits in the largest count of 64 bits


def counts_in_words(
    operations: Iterable[Operation],
    ranks_of: Callable[[int], Iterable[int]],
    standing_of: Callable[[int], Standing | None],
    *,
    all_announced: bool = False,
) -> str:
    """How many of these unnamed operations each rank has started, as far as it says so; "" if all have names.

    ranks_of: the ranks of a process set. all_announced: all of them have announced `operations`.
    """
    numbers: dict[Operation, int] = {}
    for process_set, name in operations:
        if is_unnamed(name):
            kind = process_set, name.rpartition(".")[0]
            numbers[kind] = max(place(name), numbers.get(kind, 0))
    parts = []
    for kind, number in list(numbers.items())[:MAX_KINDS]:
        process_set, name = kind
        said: dict[int, str] = {}
        for rank in ranks_of(process_set):
            one = standing_of(rank)
            count = _count(one, kind) if one is not None else None
            if all_announced:
                count = max(count or 0, number)
            if count is not None:
                said[rank] = f"started {count}{f' and is at {one.at}' if one is not None and one.at else ''}"
        if said:
            where = f" in process set {process_set}" if process_set else ""
            parts.append(f"of {printable(name)}{where}, {values_by_rank(said)}")
    if not parts:
        return ""
    return f"Operations without a name match by their number: {'; '.join(parts)}. {ADVICE}"


def _count(one: Standing, kind: Operation) -> int | None:
    count = one.unnamed.get(kind, 0 if len(one.unnamed) < MOST_KINDS else None)
    for process_set, name in one.operations:
        if process_set == kind[0] and is_unnamed(name) and name.rpartition(".")[0] == kind[1]:
            count = max(count or 0, place(name))
    return count


def place(name: str) -> int:
    """Of an unnamed operation among those of its kind, from 1."""
    return int(name.rpartition(".")[2][:MAX_DIGITS]) + 1


def with_counts(sentence: str, counts: str) -> str:
    """The sentence, which has a code, and then the counts."""
    return coded_like(sentence, f"{without_code(sentence)} {counts}") if counts else sentence
