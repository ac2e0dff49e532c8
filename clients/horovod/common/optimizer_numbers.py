"""Numbers of optimizers whose parameters have equal names, such as those of two models of one class.

Names match operations across ranks, so two optimizers need different ones: the second one that has a parameter `weight`
calls it `weight#2`, the third one `weight#3`. Ranks may use optimizers in any order, because the order in which they
make them gives the number. Ranks do not ask each other; no number comes back, so neither the garbage collector nor a
rank that keeps an old optimizer changes one.

    made                     numbered at once, if there is a world
    made, with late=True     numbered in its first step, alone: one that a rank makes only to look at changes nothing.
                             For frameworks in which each step waits for the other ranks, and compares
                             (`check_order`): ranks can't take the first steps in different orders anyway
    copied, unpickled        numbered in its first step, together with all other copies that have no number, in the
                             order in which they were made: a copy that one rank only keeps changes nothing
    from a file              as a copy; but where the script has made one optimizer alone, it takes the numbers of that
                             one, in whose place it stands: other ranks may go on with theirs, as after
                             `if hvd.rank() == 0: model = hvd.load_model(...)`
    received from root       has the number that it has on root: hvd.broadcast_object((model, optimizer)); unless this
                             rank uses one of its own that has it
    made before `restart`    numbered again as copies are, before these

`restart` begins with 1 again, on all ranks: in a new world, and whenever a training function is called by something
that calls it on all ranks, since the processes of a world have different pasts. A process that has just come to an
elastic job has made fewer optimizers than the others.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from horovod.base.errors import TrainingCode, coded
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.script import lines_of_the_script
from horovod.worker.runtime.context import Context, current

Ranks = tuple[int, ...]  # ranks of a process set; () for the global one
Numbers = tuple[dict[str, int], str]  # (numbers of an optimizer's parameters, its place)
Line = tuple[str, list[str]]  # (the place of an optimizer, the places of all optimizers that were made)


class Order(Protocol):
    """Which of several models with equal names a rank means. A Made is one."""

    place: str  # in the script
    verb: str  # "made": what the rank has done there

    def line(self) -> Line:
        """The place, and those of other models."""


class _Given:
    """The numbers that optimizers got since the last restart."""

    def __init__(self) -> None:
        self.count: dict[tuple[Ranks, str], int] = {}  # how many optimizers have a parameter of this name
        self.places: dict[tuple[Ranks, str], dict[str, int]] = {}  # by the first of its names; how often at each line
        self.made: dict[tuple[Ranks, str], int] = {}  # of those that are no copies, by the first of their names
        self.from_files: weakref.WeakSet[Made] = weakref.WeakSet()  # those that have numbers


_lock = threading.RLock()  # guards the variables below; steps begin in autograd's threads too
_given = _Given()
_world: weakref.ref[Context] | None = None  # the world of _given
_created = 0
_all: weakref.WeakSet[Made] = weakref.WeakSet()
_late: weakref.WeakSet[Made] = weakref.WeakSet()  # optimizers that get their numbers in a step
_guessed = False  # whether the optimizers in `_late` have the numbers that they would get now
_receiving = threading.local()  # has an attribute `root` while this thread unpickles what root has sent


def numbered(name: str, number: int) -> str:
    """The name of a parameter on the wire. The first optimizer leaves it as it is: `weight`, then `weight#2`."""
    return name if number == 0 else f"{name}#{number + 1}"


class Made:
    """What an optimizer's parameters are called on the wire. The optimizer alone holds it."""

    verb = "made"

    def __init__(
        self,
        names: Iterable[str],
        process_set: ProcessSet,
        is_copy: bool = False,
        numbers: Numbers | None = None,
        late: bool = False,
        is_from_file: bool = False,
    ) -> None:
        """names: of the parameters. is_copy: made by copying, by unpickling or from a file. numbers: of the one that
        was copied. late: gets its number in a step. is_from_file: is_copy as well.
        """
        global _created, _guessed
        self.is_copy = is_copy or is_from_file
        self._is_from_file = is_from_file
        self.ranks: Ranks = () if process_set is global_process_set else tuple(process_set.ranks or ())
        self.site = lines_of_the_script()
        self.place = self.site  # the line that made the optimizer, with how many optimizers it had made before
        # Called when its names on the wire have changed.
        self.tell: weakref.WeakMethod[Callable[[], None]] | None = None
        self._number_of = dict.fromkeys(sorted(names), 0)
        self._given: _Given | None = None  # to which these belong
        self._begun: _Given | None = None  # to which they belonged in the last step
        self._placed: _Given | None = None  # which knows its place
        self._on_root: tuple[_Given, Numbers] | None = None  # of one that was received and has taken no step
        self._in_step = False
        with _lock:
            _created += 1
            self.created = _created
            _all.add(self)
            _late.add(self)
            _guessed = False
            if not _enter_world():
                return
            if numbers is not None and hasattr(_receiving, "root"):
                self._on_root = _given, numbers
                _late.discard(self)
                return
            _note_place(self)
            if not self.is_copy and not late:
                _give(self)

    def label(self, name: str) -> str:
        """The name of a parameter on the wire."""
        return numbered(name, self._number_of[name])

    def called(self, name: str) -> str:
        """What an optimizer that was made with one name calls `name` on the wire, such as the name of a group."""
        return numbered(name, next(iter(self._number_of.values())))

    def first(self) -> str:
        """The first of the names on the wire; stays the same when parameters are added."""
        return self.label(next(iter(self._number_of)))

    def add(self, names: Iterable[str]) -> None:
        """More parameters."""
        with _lock:
            for name in sorted(set(names) - self._number_of.keys()):
                self._number_of[name] = 0 if self._given is None else _next(self._given, self.ranks, name)

    def begin(self, alone: bool = False) -> None:
        """A step begins. ValueError: there is no world.

        alone: if this one has no number yet, others that have none get none now. Ranks must step in the same order.
        """
        with _lock:
            if not _enter_world():
                current()  # says so
            self._in_step = False
            if self._given is not _given and not _give_as_on_root(self):
                _note_place(self)
                _give_late(self, alone)
            self._begun = _given
            self._in_step = True

    def end(self) -> None:
        """The step has ended, or was given up."""
        self._in_step = False

    @contextlib.contextmanager
    def step(self, alone: bool = False) -> Iterator[None]:
        """From `begin` to `end`."""
        self.begin(alone)
        try:
            yield
        finally:
            self.end()

    def __reduce__(self) -> tuple[Any, ...]:
        """Of an optimizer that copy or pickle goes through: the copy's is one of a copy."""
        return _copied, (list(self._number_of), self.ranks, self.numbers())

    def retire(self) -> None:
        """It takes no more steps."""
        with _lock:
            _all.discard(self)
            _late.discard(self)

    def numbers(self) -> Numbers | None:
        """What goes along with a copy; None: it has no number."""
        return (dict(self._number_of), self.place) if self._given is _given else None

    def line(self) -> Line:
        """What ranks tell each other of it, for `check_order`."""
        return self.order().line()

    def order(self) -> Order:
        """The same in its own right, for what may live longer than the optimizer."""
        return _Order(self.place, self.ranks, next(iter(self._number_of)))


@dataclass
class _Order:
    place: str
    ranks: Ranks
    name: str  # of a parameter
    verb: str = Made.verb

    def line(self) -> Line:
        with _lock:
            known = _given.places.get((self.ranks, self.name), {})
            places = [_place(site, time) for site, times in known.items() for time in range(1, times + 1)]
            return self.place, places


def _copied(names: list[str], ranks: Ranks, numbers: Numbers | None) -> Made:
    made = Made(names, global_process_set, True, numbers)
    made.ranks = ranks  # it has no number yet
    return made


def restart(first: Iterable[Made] = ()) -> None:
    """Numbers begin with 1 again. All ranks call this before they make and use the same optimizers.

    first: get their numbers now, in this order. The others get theirs in a step.
    """
    global _given, _guessed
    with _lock:
        _given, _guessed = _Given(), False
        _late.update(one for one in _all if one._on_root is None)
        if _enter_world():
            for one in first:
                _note_place(one)
                _give(one)


@contextlib.contextmanager
def of_root() -> Iterator[None]:
    """What this thread unpickles meanwhile is what root has sent to all ranks; root keeps its own."""
    _receiving.root = True
    try:
        yield
    finally:
        del _receiving.root


def guess_late() -> None:
    """Gives those without a number the one that they would get now: others may wait for a rank that begins no step.

    They get their numbers for good in a step: until then more may be made, or some may be gone.
    """
    global _given, _guessed
    with _lock:
        if _guessed or not _late or not _enter_world():
            return
        _guessed = True
        good = _given
        _given = _Given()
        _given.count.update(good.count)
        _given.made.update(good.made)
        _given.from_files.update(good.from_files)
        late = _in_order(_late)
        for one in late:
            _give(one)
        _given = good
        _late.update(late)


def check_order(lines: Mapping[int, Line], verb: str = "made") -> None:
    """ValueError if ranks mean different optimizers by one name on the wire.

    lines: by rank, what it says of the one that it means. verb: what it has done there.

    Ranks may make it at different lines of a script, and may make others that no other rank makes. But if two ranks
    have made both, their gradients would be mixed.
    """
    for rank, (place, places) in lines.items():
        for other, (its_place, its_places) in lines.items():
            if place != its_place and place in its_places and its_place in places:
                raise ValueError(
                    coded(
                        TrainingCode.DIFFERENT_ORDER,
                        "Several models have parameters of the same names, and the ranks have not made or used their "
                        "distributed optimizers or tapes in the same order, so that gradients would be mixed up. In "
                        f"this step rank {rank} uses what it {verb} at {place}, and rank {other} what it {verb} at "
                        f"{its_place}. Make and use them in the same order on all ranks, or give the parameters of "
                        "each model different names. No rank has taken the step.",
                    )
                )


def _enter_world() -> bool:
    """Whether there is a world. Numbers of another one are over."""
    global _world
    try:
        world = current()
    except ValueError:
        return False
    if _world is None or _world() is not world:
        _world = weakref.ref(world)
        restart()
    return True


def _next(given: _Given, ranks: Ranks, name: str) -> int:
    number = given.count.get((ranks, name), 0)
    given.count[ranks, name] = number + 1
    return number


def _give(made: Made) -> None:
    before = made._number_of
    made._given = _given
    if made._is_from_file and _has_a_place_to_take(made):
        made._number_of = dict.fromkeys(before, 0)
    else:
        made._number_of = {name: _next(_given, made.ranks, name) for name in before}
    if made._is_from_file:
        _given.from_files.add(made)
    _late.discard(made)
    if made._number_of != before and made.tell is not None and (tell := made.tell()) is not None:
        tell()


def _has_a_place_to_take(made: Made) -> bool:
    """Whether one optimizer alone has numbers for these names: the one that was made, or one from a file and gone."""
    names = [(made.ranks, name) for name in made._number_of]
    if any(_given.count.get(name) != 1 for name in names):
        return False
    if _given.made.get(names[0], 0) == 0:
        gc.collect()
        return not any(one.ranks == made.ranks and one is not made for one in _given.from_files)
    return _given.made[names[0]] == 1


def _note_place(made: Made) -> None:
    if made._number_of and made._placed is not _given:
        made._placed = _given
        name = made.ranks, next(iter(made._number_of))
        if not made.is_copy:
            _given.made[name] = _given.made.get(name, 0) + 1
        known = _given.places.setdefault(name, {})
        known[made.site] = time = known.get(made.site, 0) + 1
        made.place = _place(made.site, time)


def _place(site: str, time: int) -> str:
    return site if time == 1 else f"{site} (number {time} of this line)"


def _give_as_on_root(made: Made) -> bool:
    """Gives one that root has sent root's numbers, unless one of this rank has taken a step with them."""
    on_root, made._on_root = made._on_root, None
    if on_root is None or on_root[0] is not _given:
        return False
    number_of, place = on_root[1]
    same = [one for one in _all if one._given is _given and one.ranks == made.ranks]
    same = [one for one in same if number_of.items() & one._number_of.items()]
    if any(one._begun is _given for one in same):
        return False
    for one in same:
        one._given = None  # it gets others if it takes a step
    made.is_copy, made.place, made._given, made._number_of = False, place, _given, dict(number_of)
    for name, number in number_of.items():
        _given.count[made.ranks, name] = max(_given.count.get((made.ranks, name), 0), number + 1)
    if made.tell is not None and (tell := made.tell()) is not None:
        tell()
    return True


def _give_late(first: Made, alone: bool) -> None:
    """`first` begins a step, and others get their numbers with it."""
    global _guessed
    if alone:
        _give(first)
        return
    late = [one for one in _in_order(_late) if one.ranks == first.ranks and (first.is_copy or not one.is_copy)]
    _guessed = False
    for one in late if first in late else [*late, first]:
        _give(one)


def _in_order(late: Iterable[Made]) -> list[Made]:
    several = sorted((one for one in late if not one._in_step), key=lambda one: (one.is_copy, one.created))
    names: list[Any] = [name for one in several for name in one._number_of]
    if len(set(names)) == len(names):
        return several
    # Optimizers that nobody holds any more may be in a cycle of references, and must not get a number.
    alive = weakref.WeakSet(several)
    del several
    gc.collect()
    return sorted(alive, key=lambda one: (one.is_copy, one.created))
