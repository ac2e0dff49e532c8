"""YAML whose every value knows its line.

PyYAML's composer keeps the marks that its constructor throws away, so nothing is parsed twice and no other library is
needed (docs/adr/0054-job-files.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from horovod.base.errors import ClusterCode, coded

# How many characters a file may have if each alias is replaced by its value; each value counts as _VALUE more.
# Without a limit a file of 218 bytes, each line of which names the one before several times, takes all memory.
MAX_EXPANDED = 4 << 20
_VALUE = 64


class LineError(ValueError):
    """Something is wrong with a line. `problems` has one sentence for each, without a code."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(coded(ClusterCode.WRONG_JOB_FILE, "\n".join(problems)))
        self.problems = problems


@dataclass(frozen=True)
class Located:
    """A value: `data` as yaml.safe_load would give it, `text` of a scalar as it was written."""

    data: Any
    line: int
    text: str = ""
    keys: dict[str, Located] = field(default_factory=dict)  # the values of a mapping, by key
    key_lines: dict[str, int] = field(default_factory=dict)
    items: tuple[Located, ...] = ()  # the values of a sequence


def load(text: str, name: str) -> Located:
    """The document in `text`. LineError for what is no YAML, has a key twice, or has keys that are no strings."""
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                raise LineError([f"{name} is empty."])
            if expanded(node, {}) > MAX_EXPANDED:
                sentence = (
                    f"{name} repeats values by `*alias` so often that it would expand to more than "
                    f"{MAX_EXPANDED >> 20} MiB. Write the values out."
                )
                raise LineError([sentence])
            return _Reader(loader, name).read(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise LineError([f"{name}, line {line}: this is not YAML: {error.problem or error.context}."]) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, LineError):
            raise
        raise LineError([f"{name} is not YAML: {' '.join(str(error).split())}."]) from error


def expanded(node: Any, known: dict[int, int]) -> int:
    """How many characters come of the node if each alias, of a merge (`<<: *alias`) too, is replaced by its value.

    known: sizes of values by the identity of their nodes, so that each is visited once."""
    if id(node) not in known:
        known[id(node)] = 0  # of a value that contains itself, which is told by its line later
        if isinstance(node, yaml.ScalarNode):
            parts = len(node.value)
        elif isinstance(node, yaml.MappingNode):
            parts = sum(expanded(one, known) for pair in node.value for one in pair)
        else:
            parts = sum(expanded(one, known) for one in node.value)
        known[id(node)] = _VALUE + parts
    return known[id(node)]


class _Reader:
    def __init__(self, loader: yaml.SafeLoader, name: str) -> None:
        self._loader = loader
        self._name = name
        self._open: set[int] = set()  # nodes that are being read: an alias may lead back to one

    def read(self, node: Any) -> Located:
        line = node.start_mark.line + 1
        if isinstance(node, yaml.ScalarNode):
            return Located(self._scalar(node), line, node.value)
        if id(node) in self._open:
            raise LineError([f"{self._name}, line {line}: this value contains itself."])
        self._open.add(id(node))
        try:
            return self._mapping(node, line) if isinstance(node, yaml.MappingNode) else self._sequence(node, line)
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag.endswith((":timestamp", ":binary")):  # JSON has no such values
            return node.value
        return self._loader.construct_object(node)

    def _sequence(self, node: Any, line: int) -> Located:
        items = tuple(self.read(one) for one in node.value)
        return Located([one.data for one in items], line, items=items)

    def _mapping(self, node: Any, line: int) -> Located:
        merged = [key for key, _ in node.value if key.tag == "tag:yaml.org,2002:merge"]
        own = {key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)}
        if merged:
            self._loader.flatten_mapping(node)  # merged keys come first
        keys: dict[str, Located] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            at = key.start_mark.line + 1
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if not isinstance(name, str):
                raise LineError([f"{self._name}, line {at}: a key must be a word."])
            if name in keys and not (merged and name in own):
                raise LineError([f"{self._name}, line {at}: the key {name!r} is there already, in line {lines[name]}."])
            keys[name], lines[name] = self.read(value), at
        return Located({name: one.data for name, one in keys.items()}, line, keys=keys, key_lines=lines)
