"""Parts of an elastic state: objects such as models, which a script trains itself, so that no copy may replace them.

A state restores and sends a part in place, wherever it is: as an attribute or inside lists, tuples, dicts and objects.
What holds a part is treated like this:

    lists, dicts, objects            "holders": they stay the objects that they are, and get their contents back
    tuples, objects with slots or    are replaced by copies that refer to the same parts
    with copying of their own
    sets                             have no order that all ranks know, so their parts are not found: a warning

A part has a path, such as "models[0]" or "trainer.model", by which the ranks know it.
"""

from __future__ import annotations

import copyreg
import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["HOLDER", "Parts", "contents_of", "find_parts", "refill"]

HOLDER: Final = "holder"
_DEEPEST: Final = 50  # levels of containers in containers; parts below are not found
_ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, range, type(Ellipsis)})
_PLAIN: Final = frozenset({list, dict, tuple, set, frozenset})
_WITHOUT_PARTS: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_COPYING: Final = (
    *("__deepcopy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__"),
    *("__getnewargs__", "__getnewargs_ex__"),
)
_LISTS: Final = (list, deque)
_BASES: Final = (OrderedDict, defaultdict, dict, list, deque, types.SimpleNamespace)


@dataclass
class Parts:
    """Of one rank's state, at one moment."""

    found: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # path -> what kind of part is there
    holders: dict[str, Any] = field(default_factory=dict)
    in_sets: dict[str, Any] = field(default_factory=dict)  # path of a set -> a part that is nowhere else

    def objects(self) -> dict[str, Any]:
        """All that copies share with the state."""
        return self.found | self.holders

    def all_kinds(self) -> dict[str, str]:
        """Of all objects."""
        return self.kinds | dict.fromkeys(self.holders, HOLDER)


def find_parts(values: Mapping[str, Any], kind_of: Callable[[Any], str | None]) -> Parts:
    """Searches the attributes of a state. kind_of: returns the kind of part that a value is, or None."""
    search = _Search(kind_of)
    for name in sorted(values):  # attributes first: a part has the shortest of its paths
        search.take(values[name], name)
    for name in sorted(values):
        search.walk(values[name], name, 0)
    known = {id(one) for one in search.parts.found.values()}
    search.parts.in_sets = {path: one for path, one in search.parts.in_sets.items() if id(one) not in known}
    return search.parts


class _Search:
    def __init__(self, kind_of: Callable[[Any], str | None]) -> None:
        self.parts = Parts()
        self._kind_of = kind_of
        self._kinds: dict[type, str | None] = {}  # by class: to ask takes longer than all the rest
        self._seen: dict[int, bool] = {}  # id of a container -> whether there are parts in it

    def _kind(self, value: Any) -> str | None:
        kind = type(value)
        if kind in _ATOMS or kind in _PLAIN or isinstance(value, _WITHOUT_PARTS):
            return None
        if kind not in self._kinds:
            self._kinds[kind] = self._kind_of(value)
        return self._kinds[kind]

    def take(self, value: Any, path: str) -> bool:
        if (kind := self._kind(value)) is None:
            return False
        if id(value) not in self._seen:
            self._seen[id(value)] = True
            self.parts.found[path] = value
            self.parts.kinds[path] = kind
        return True

    def walk(self, value: Any, path: str, depth: int) -> bool:
        """Whether there are parts in the value."""
        if type(value) in _ATOMS or isinstance(value, _WITHOUT_PARTS) or depth > _DEEPEST:
            return False
        if type(value) in _PLAIN and _ATOMS.issuperset(map(type, value.values() if type(value) is dict else value)):
            return False  # most large values are lists of numbers
        if id(value) in self._seen:
            return self._seen[id(value)]
        if self.take(value, path):
            return True
        self._seen[id(value)] = False  # for objects that refer back to this one
        if isinstance(value, (set, frozenset)):
            return self._look_at_set(value, path)
        has_parts = False
        for inner, child in _children(value, path):
            has_parts |= self.walk(child, inner, depth + 1)
        self._seen[id(value)] = has_parts
        if has_parts and _is_holder(value):
            self.parts.holders[path] = value
        return has_parts

    def _look_at_set(self, value: Iterable[Any], path: str) -> bool:
        for one in value:
            if self._kind(one) is not None:
                self.parts.in_sets[path] = one
        return False


def _children(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Paths and values of what is directly in the value, without numbers, texts and the like."""
    if isinstance(value, dict):
        for place, (key, child) in enumerate(value.items()):
            if type(child) not in _ATOMS:
                # The representation of another key may contain an address, which differs between ranks.
                yield f"{path}[{key!r}]" if isinstance(key, (str, int, float, tuple)) else f"{path}[key {place}]", child
    elif isinstance(value, (*_LISTS, tuple)):
        for place, child in enumerate(value):
            if type(child) not in _ATOMS:
                yield f"{path}[{place}]", child
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from _children({"func": value.func, "args": value.args, "keywords": value.keywords}, path)
    if type(value) in _PLAIN:
        return  # without attributes
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        for name, child in list(attributes.items()):
            if type(child) not in _ATOMS:
                yield f"{path}.{name}", child
    for name in _slots(type(value)):
        if hasattr(value, name):
            yield f"{path}.{name}", getattr(value, name)


def _slots(kind: type) -> list[str]:
    return copyreg._slotnames(kind) if any("__slots__" in one.__dict__ for one in kind.__mro__) else []  # type: ignore[attr-defined]


def _is_holder(value: Any) -> bool:
    """Whether its contents can be exchanged in place: nothing of its class copies in a way of its own."""
    kind = type(value)
    base = next((one for one in _BASES if isinstance(value, one)), object)
    if isinstance(value, (tuple, types.MethodType, functools.partial)) or _slots(kind):
        return False
    if base is object and not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return all(getattr(kind, name, None) is getattr(base, name, None) for name in _COPYING)


def contents_of(holder: Any) -> tuple[Any, dict[str, Any]]:
    """Items and attributes of a holder, in new containers; the values are the holder's."""
    items: Any = None
    if isinstance(holder, dict):
        items = dict(holder)
    elif isinstance(holder, _LISTS):
        items = list(holder)
    return items, dict(getattr(holder, "__dict__", {}))


def refill(holder: Any, contents: tuple[Any, dict[str, Any]]) -> None:
    """Replaces the contents of a holder by these."""
    items, attributes = contents
    if isinstance(holder, dict):
        holder.clear()
        holder.update(items)
    elif isinstance(holder, _LISTS):
        holder.clear()
        holder.extend(items)
    if hasattr(holder, "__dict__"):
        for name in [one for one in holder.__dict__ if one not in attributes]:
            del holder.__dict__[name]
        holder.__dict__.update(attributes)
