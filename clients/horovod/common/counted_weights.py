"""Comparisons of weights where no word goes with each step: the steps are counted, and words go with the first ones.

Optimizers of PyTorch say a word at the end of each step, which can carry a digest (same_weights.py). TensorFlow, JAX
and MXNet run a step without such an operation. A rank can't compare by itself when it likes, for the others would not
be there. So all ranks say words in the same steps: in the first WORDS of a world, and then in each one in which a
setting asks for a comparison. Steps are counted by the name of the operation, and operations of one name meet each
other in their order. So the numbers are equal on all ranks, also if only some have made their model anew. Ranks that
have joined (hvd.join) took fewer steps, so all count anew after that.

What JAX compiles must not wait before its gradients are reduced. Such a step says its words first (`say`) and hears
those of the others behind its reductions (`hear`), which it has waited for anyway. By then it may have overwritten its
weights, so the digest of each is kept. It calls nothing here in steps in which nothing is due (`idle`), and says later
how many there were.

In its first step a model brings no digest of weights: scripts and callbacks of Keras broadcast after the first step,
because only then all variables exist.

Of several models with equal names, ranks may mean different ones. That is compared in these steps before anything
else, the first one too. In functions of TensorFlow, names don't tell such optimizers apart: if all ranks have gone over
from one to another, they compare in each step from then on.
"""

from __future__ import annotations

import itertools
import secrets
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from horovod.common.ops.objects import allgather_object
from horovod.common.ops.questions import first_round
from horovod.common.ops.specs import set_number, set_size
from horovod.common.ops.step_words import Digests, Heard
from horovod.common.optimizer_numbers import Order, check_order
from horovod.common.process_sets import ProcessSet
from horovod.common.same_weights import Exchange, Held, Item, Kind, SameWeights
from horovod.worker.runtime.context import Context, current, is_member

WORDS: Final = 16
FOR_EVER: Final = 1 << 62  # steps
_FIRST: Final = 2  # the step of a model in which it is compared
_ROW: Final = 2048  # 64-bit numbers
_WORD_BYTES: Final = 8
_SALT_BITS: Final = 38
_COUNT_BITS: Final = 24
_PART: Final = 1 << 16  # numbers
_NO_NUMBERS: Final = "OSUMm"  # kinds of dtypes

Thing = tuple[str, str, Any]  # owner and name, as in Held, and an array (of NumPy, or what becomes one) or a number


class _Steps:
    """Of this process in a world, since all ranks have joined last."""

    def __init__(self, world: Context, since: int) -> None:
        self.world = weakref.ref(world)
        self.since = since
        self.by_name: dict[tuple[str, int], int] = {}
        self.last: dict[tuple[str, int], int] = {}  # the model that this rank has meant last
        self.of_several: set[tuple[str, int]] = set()  # names that all ranks use for several optimizers
        self.postponed = False


_steps: _Steps | None = None


def _steps_now() -> _Steps:
    global _steps
    world, since = current(), first_round()
    if _steps is None or _steps.world() is not world or _steps.since != since:
        _steps = _Steps(world, since)
    return _steps


def postpone(until_later: bool) -> None:
    """All ranks call it: no step counts until they call it again, because a broadcast is still to come."""
    _steps_now().postponed = until_later


@dataclass(frozen=True)
class _OrderWord:
    """That a rank has said."""

    exchange: Exchange
    order: Order
    is_another: bool  # model than that of the step before


class CountedWeights:
    """One for each model. In each step, on all ranks: if `is_due`, then `compare`, or `say` and later `hear`.

    wire: the operation's name, equal on all ranks. things: what is compared, which is read in `compare` or in `say`;
    remedy, made: as for SameWeights.
    """

    def __init__(
        self,
        wire: str,
        things: Any,  # Callable[[], Iterable[Thing]], possibly with further methods; see the callers
        process_set: ProcessSet,
        remedy: Callable[[set[Kind]], str],
        made: Order | None = None,
    ) -> None:
        self.things = things
        self.number = next(_numbers)
        self.wire = wire
        self._process_set = process_set
        self._same = SameWeights(self._digest, self._held, process_set, remedy, made)
        self._keeps = False
        self._kept: Held = {}
        self.order: Order | None = made
        self._counted: _Steps | None = None  # where `_own` counts
        self._own = 0  # steps of this model
        self._is_order_due = self._are_weights_due = False
        self._said: tuple[_OrderWord | None, Exchange | None] = None, None
        _by_number[self.number] = self

    def compare_others(self, things: Any, made: Order | None = None) -> None:
        """The model has another optimizer, or trains other variables than before."""
        self.things = things
        self._same.made = made
        self._same.ask()

    def retire(self) -> None:
        """A graph that asks for it by its number compares nothing any more."""
        _by_number.pop(self.number, None)

    def is_due(self, call: int = 0, skipped: int = 0) -> bool:
        """Counts a step, and says whether something is compared in it: the same on all ranks.

        call: a key for each of several operations that have one name on the wire. skipped: steps before this one of
        which it was not asked.
        """
        if not is_member():
            return False
        settings = current().settings
        process_set = self._process_set
        if not process_set.included() or set_size(process_set) == 1:
            return False
        steps = _steps_now()
        has_weights = not steps.postponed and settings.different_weights != "ignore"
        if not has_weights and self.order is None:
            return False
        if self._counted is not steps:
            self._counted, self._own = steps, 0
        key = self._key(call)
        step = steps.by_name[key] = steps.by_name.get(key, 0) + skipped + 1
        # Operations of one name in one function are numbered in an order that ranks check (tensorflow/model_order.py).
        self._is_order_due = self.order is not None and not call and (step <= WORDS or key in steps.of_several)
        self._are_weights_due = False
        if has_weights:
            self._own += skipped + 1
            every = settings.compare_weights_steps
            again = every > 0 and step % every == 0
            if again:
                self._same.ask()
            self._are_weights_due = again or step <= WORDS
        return self._is_order_due or self._are_weights_due

    def idle(self, call: int = 0) -> int:
        """After `is_due`: so many steps follow in which nothing is due, in this world and until all ranks have joined.

        The next call of `is_due` is told of them.
        """
        if not is_member():
            return 0
        if not self._process_set.included() or set_size(self._process_set) == 1:
            return FOR_EVER
        steps, settings = _steps_now(), current().settings
        step = steps.by_name.get(self._key(call), 0)
        if step < WORDS or steps.postponed or self._key(call) in steps.of_several:
            return 0
        every = settings.compare_weights_steps
        return every - step % every - 1 if every else FOR_EVER

    def compare(self, call: int = 0) -> None:
        """Waits for all ranks. Raises what check_order and SameWeights.take do."""
        if (order := self._say_order(call)) is not None:
            self._take_order(order, order.exchange.hear(), call)
        if (weights := self._say_weights(call)) is not None:
            self._same.take(weights.hear(), weights.wire)

    def say(self, call: int = 0) -> None:
        """The first part of `compare`, which waits for nobody. What is compared may change before `hear`."""
        self._keeps = True
        self._said = self._say_order(call), self._say_weights(call)

    def hear(self, call: int = 0) -> None:
        """The other part: waits, and raises what `compare` does."""
        (order, weights), self._said = self._said, (None, None)
        heard_order = None if order is None else order.exchange.hear()
        heard_weights = None if weights is None else weights.hear()
        if order is not None and heard_order is not None:
            self._take_order(order, heard_order, call)
        if weights is not None and heard_weights is not None:
            self._same.take(heard_weights, weights.wire)
        self._kept = {}

    def _say_weights(self, call: int) -> Exchange | None:
        if not self._are_weights_due:
            return None
        exchange = Exchange(self._wire_of(call), self._process_set)
        exchange.say(self._same.digest() if self._own >= _FIRST else None)
        self._same.steps = self._own - 1
        return exchange

    def _say_order(self, call: int) -> _OrderWord | None:
        if self.order is None or not self._is_order_due:
            return None
        steps, key = _steps_now(), self._key(call)
        is_another = steps.last.get(key, self.number) != self.number
        steps.last[key] = self.number
        exchange = Exchange(f"{self._wire_of(call)}.order", self._process_set)
        exchange.say(zlib.crc32(f"{self.order.place} {is_another}".encode()))
        return _OrderWord(exchange, self.order, is_another)

    def _take_order(self, word: _OrderWord, heard: Heard, call: int) -> None:
        if heard.digests is Digests.DIFFERENT:
            lines = allgather_object(word.order.line(), word.exchange.wire, self._process_set)
            check_order(dict(zip(self._process_set.ranks or range(len(lines)), lines, strict=True)), word.order.verb)
        elif heard.digests is Digests.EQUAL and word.is_another:
            _steps_now().of_several.add(self._key(call))

    def _digest(self) -> int:
        if not self._keeps:
            return digest_of(self.things())
        self._kept = _held(self.things())
        return zlib.crc32(repr(sorted((owner, sorted(_digests(one))) for owner, one in self._kept.items())).encode())

    def _held(self) -> Held:
        return self._kept if self._keeps else _held(self.things())

    def _key(self, call: int) -> tuple[str, int]:
        return self._wire_of(call), set_number(self._process_set, "Allreduce")

    def _wire_of(self, call: int) -> str:
        return f"{self.wire}@{call}" if call else self.wire


# Another beginning in each process: a graph that was loaded from a file names the numbers of the one that wrote it.
_numbers: Final = itertools.count(secrets.randbits(_SALT_BITS) << _COUNT_BITS)
_by_number: Final[weakref.WeakValueDictionary[int, CountedWeights]] = weakref.WeakValueDictionary()
_of_models: Final[dict[tuple[int, Hashable], CountedWeights]] = {}


def of_model(model: object, key: Hashable, make: Callable[[], CountedWeights]) -> CountedWeights:
    """The one for `key` of a model; it lives as long as `model` does, which it must not hold."""
    known = id(model), key
    found = _of_models.get(known)
    if found is None:
        found = _of_models[known] = make()
        weakref.finalize(model, _of_models.pop, known, None).atexit = False
    return found


def is_due(number: int, call: int) -> bool:
    """The CountedWeights with this number, of a compiled function. False if its model is gone."""
    found = _by_number.get(number)
    return found is not None and found.is_due(call)


def compare(number: int, call: int) -> None:
    if (found := _by_number.get(number)) is not None:
        found.compare(call)


# -- digests -----------------------------------------------------------------------------------------------------------
def digest_of(things: Iterable[Thing]) -> int:
    """Of all things, in 32 bits."""
    told = [
        (owner, name, value if isinstance(value, float) else (value.shape, _number(value)))
        for owner, name, value in _values(things)
    ]
    return zlib.crc32(repr(sorted(told, key=lambda one: one[:2])).encode())


def _held(things: Iterable[Thing]) -> Held:
    held: dict[str, dict[str, Item]] = {}
    for owner, name, value in _values(things):
        item = Item(value, value) if isinstance(value, float) else Item(_number(value), _norm(value))
        held.setdefault(owner, {})[name] = item
    return held


def _digests(items: Mapping[str, Item]) -> Iterator[tuple[str, int | float]]:
    for name, item in items.items():
        yield name, item.digest


def _values(things: Iterable[Thing]) -> Iterable[tuple[str, str, Any]]:
    """An array of one number is that number."""
    for owner, name, value in things:
        array = np.asarray(value)
        if array.dtype.kind in _NO_NUMBERS:
            continue
        if array.dtype.names:  # MXNet's bfloat16
            array = array.view(np.uint16)
        yield owner, name, float(array.reshape(())) if array.size == 1 and array.dtype.kind != "c" else array


def _number(array: np.ndarray[Any, Any]) -> int:
    """Adds up 64-bit numbers row by row, at the speed of memory, and makes a checksum of the sums and of the rest."""
    numbers = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = numbers.size // _WORD_BYTES * _WORD_BYTES
    words = numbers[:whole].view(np.uint64)
    in_rows = words.size // _ROW * _ROW
    sums = np.add.reduce(words[:in_rows].reshape(-1, _ROW), axis=1, dtype=np.uint64)
    made = 0
    for part in (sums, words[in_rows:], numbers[whole:]):
        made = zlib.crc32(part.tobytes(), made)
    return made


def _norm(array: np.ndarray[Any, Any]) -> float | None:
    if array.dtype.kind in "iub":
        return None
    flat, wide = array.reshape(-1), np.complex128 if array.dtype.kind == "c" else np.float64
    total = 0.0
    for place in range(0, flat.size, _PART):  # small ones stay in the cache, and no thread of a library is woken
        part = flat[place : place + _PART].astype(wide)
        total += float(np.add.reduce((part * part.conj()).real))
    return float(total**0.5)
