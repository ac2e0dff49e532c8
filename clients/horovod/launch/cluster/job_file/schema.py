"""Checks a job file against schema.json, which also editors use, and says what is wrong with which line.

It knows those words of JSON Schema that schema.json uses (`KNOWN`), and a test compares its judgement with that of the
library jsonschema: a sentence of ours names the line, the key and what was expected, and the library is not needed
(docs/adr/0054-job-files.md).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from horovod.base.frameworks import WITH_AN_API
from horovod.launch.located import LineError, Located

SCHEMA = Path(__file__).with_name("schema.json")
KNOWN = {
    "$schema", "title", "description", "type", "required", "properties", "additionalProperties", "items", "enum",
    "minimum", "maximum", "minLength", "minItems", "maxItems", "pattern",
}  # fmt: skip

_NAMES = {
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "nothing",
    "object": "keys with values",
    "array": "a list",
}
_TYPES: Mapping[str, type] = {"string": str, "object": dict, "array": list, "null": type(None)}
_NUMBERS = ("integer", "number")
_SHOWN = 60  # characters of a value that a message shows


@cache
def schema() -> Mapping[str, Any]:
    """schema.json, with the frameworks that there are."""
    content: Mapping[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    content["properties"]["framework"]["enum"] = [one.name.lower() for one in WITH_AN_API]
    return content


def check(document: Located, name: str) -> None:
    """LineError with a sentence for everything that is wrong, in the order of the lines."""
    problems = sorted(_problems(schema(), document, "", document.line))
    if problems:
        raise LineError([f"{name}, line {line}: {sentence}" for line, sentence in problems])


def _problems(rule: Mapping[str, Any], found: Located, path: str, line: int) -> Iterator[tuple[int, str]]:
    """line: of the key, or of the value where it has none."""
    what = f"{path!r}" if path else "the file"
    if (choices := rule.get("enum")) is not None:
        if found.data not in choices:
            yield (
                line,
                f"{what} is {_shown(found)}: expected one of {', '.join(map(str, choices))}{_close(found, choices)}",
            )
        return
    kinds = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    if not any(_is(found.data, kind) for kind in kinds):
        yield line, f"{what} is {_shown(found)}: expected {_expected(rule, kinds)}."
    elif isinstance(found.data, dict):
        yield from _of_mapping(rule, found, path, line)
    elif isinstance(found.data, list):
        if not rule.get("minItems", 0) <= len(found.items) <= rule.get("maxItems", len(found.items)):
            yield line, f"{what} has {len(found.items)} entries: expected {_range(rule, 'Items')}."
        for number, item in enumerate(found.items, 1):
            yield from _problems(rule["items"], item, f"{path}, entry {number}" if path else "", item.line)
    elif isinstance(found.data, str):
        if len(found.data) < rule.get("minLength", 0):
            yield line, f"{what} is empty."
        elif "pattern" in rule and not re.search(rule["pattern"], found.data):
            yield line, f"{what} is {_shown(found)}: expected {rule['description']}, like {rule['pattern']}."
    elif _is(found.data, "number") and not _in_range(rule, found.data):
        yield line, f"{what} is {_shown(found)}: expected {_expected(rule, [one for one in kinds if one in _NUMBERS])}."


def _in_range(rule: Mapping[str, Any], number: float) -> bool:
    return bool(rule.get("minimum", number) <= number <= rule.get("maximum", number))


def _of_mapping(rule: Mapping[str, Any], found: Located, path: str, line: int) -> Iterator[tuple[int, str]]:
    known = rule.get("properties", {})
    more = rule.get("additionalProperties")
    for key, value in found.keys.items():
        at = found.key_lines[key]
        inner = f"{path}.{key}" if path else key
        if key in known:
            yield from _problems(known[key], value, inner, at)
        elif more:
            yield from _problems(more, value, inner, at)
        else:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known))}."
            yield at, f"unknown key {inner!r}; {hint}"
    for key in rule.get("required", ()):
        if key not in found.keys:
            yield line, f"the key {key!r} is missing{f' in {path!r}' if path else ''}: {known[key]['description']}."


def _is(data: Any, kind: str) -> bool:
    if isinstance(data, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(data, int) or (isinstance(data, float) and data.is_integer())
    if kind == "number":
        return isinstance(data, int | float) and data == data and abs(data) != float("inf")
    return isinstance(data, _TYPES[kind]) if kind in _TYPES else False


def _expected(rule: Mapping[str, Any], kinds: list[str]) -> str:
    limits = f" from {rule['minimum']} to {rule['maximum']}" if "minimum" in rule else ""
    words = " or ".join(_NAMES[kind] + (limits if kind in _NUMBERS else "") for kind in kinds)
    if limits and len(kinds) == 1:
        return words
    return f"{words} ({rule['description']})" if "description" in rule else words


def _range(rule: Mapping[str, Any], what: str) -> str:
    least, most = rule.get(f"min{what}", 0), rule.get(f"max{what}")
    return f"at least {least}" if most is None else f"from {least} to {most}"


def _shown(found: Located) -> str:
    if isinstance(found.data, dict | list):
        return f"a {'mapping' if isinstance(found.data, dict) else 'list'}"
    text = found.text or "empty"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _close(found: Located, choices: list[str]) -> str:
    close = difflib.get_close_matches(str(found.data), choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else "."
