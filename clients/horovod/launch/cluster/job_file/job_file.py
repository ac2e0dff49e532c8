"""A job file as an object, and the job that it asks for.

It is checked against schema.json, which also editors use. The check knows those words of JSON Schema that schema.json
uses (`KNOWN`), and a test compares its judgement with that of the library jsonschema: a sentence of ours names the
line, the key and what was expected, and the library is not needed (docs/adr/0054-job-files.md).
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from horovod.base.errors import ClusterCode
from horovod.base.frameworks import WITH_AN_API
from horovod.base.settings import ROWS
from horovod.launch.elastic.request import REPLACEMENTS_PER_PROCESS, Replacement, elastic_variables, write_policy
from horovod.launch.located import LineError, Located, load
from horovod.protos.v1 import jobs_pb2

_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_MAX_PROCESSES = 1 << 16
_MODULES = {one.name.lower(): one.packages[0] for one in WITH_AN_API}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Variables of a process with a rank. A line that is not distributed belongs to no world, and is started without them.
_OF_A_RANK = tuple(
    ROWS[name].env
    for name in (
        "coordinator", "token", "job", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size",
        "incarnation", "relay_socket", "elastic", "min_size", "max_size",
    )
)  # fmt: skip

# The Python that `python` means on the worker, or python3 where there is no such name.
_PYTHON = 'command -v python > /dev/null 2>&1 && exec python "$@"; exec python3 "$@"'
_LOOK = """
import importlib.util, sys
missing = [name for name in sys.argv[2:] if importlib.util.find_spec(name) is None]
if missing:
    sentence = f"The job file asks for {sys.argv[1]}, but {sys.executable} has no {' and no '.join(missing)}."
    sys.exit(sentence + " [CODE]")
""".replace("CODE", ClusterCode.NO_PYTHON_ENVIRONMENT)


@dataclass(frozen=True)
class JobFile:
    path: Path
    content: Located

    @classmethod
    def read(cls, path: Path) -> JobFile:
        """OSError when it can't be read; LineError with a sentence for everything that is wrong with it."""
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise LineError([f"{path} can't be read: it is not UTF-8 text."]) from error
        content = load(text, str(path))
        check(content, str(path))
        found = cls(path, content)
        if problems := sorted(found._problems()):
            raise LineError([f"{path}, line {line}: {sentence}" for line, sentence in problems])
        return found

    @property
    def code(self) -> Path | None:
        """The folder with the code that is sent to the workers."""
        return self.path.parent / self._get("code") if self._get("code") else None

    def line_of(self, key: str) -> int:
        return self.content.key_lines[key]

    @property
    def replacement(self) -> Replacement | None:
        """How failed processes are replaced, and between which sizes the job changes; None: its size is fixed."""
        keys = self.content.keys["workers"].data
        if not isinstance(keys, dict):
            return None
        fewest, most = int(keys["min"]), keys.get("max")
        replacements = int(keys.get("reset_limit", REPLACEMENTS_PER_PROCESS * fewest))
        cooldown_s = (keys["cooldown"][0], keys["cooldown"][1]) if "cooldown" in keys else None
        sizes = (fewest, None if most is None else int(most))
        return Replacement(replacements, sizes, cooldown_s, since_progress="reset_limit" not in keys)

    def spec(self, environ: Mapping[str, str], user: str, attended: bool) -> jobs_pb2.JobSpec:
        """What to submit, without its code. LineError for a variable that `environ` was to give and does not;
        ValueError for one that is a setting and makes no sense.
        """
        workers, each = self._workers, int(self._get("processes", 1))
        image = self._get("image")
        spec = jobs_pb2.JobSpec(
            name=self._get("name") or self.path.stem,
            project=self._get("project", ""),
            environment=self._environment(environ),
            directory=self._get("directory", ""),
            processes=workers * each,
            processes_per_worker=each,
            slots_per_worker=int(self._get("slots", each)),
            labels={**self._texts("labels"), **({"image": image} if image else {})},
            user=user,
            attended=attended,
            python_environment=self._get("environment", ""),
        )
        spec.needs.gpus = int(self._get("gpus", 0)) // each
        spec.needs.cpus = self._get("cpus", 0) / each
        spec.needs.memory_bytes = self._memory() // each
        write_policy(spec, self.replacement, dict(spec.environment))
        for name, value in elastic_variables(self.replacement).items():
            spec.environment[name] = value
        if framework := self._get("framework"):
            look = [_LOOK, framework, _MODULES[framework], "horovod"]
            line = spec.lines.add(command=["sh", "-c", _PYTHON, "python", "-c", *look])
            line.title, line.shown = f"the look for {framework}", f"import {_MODULES[framework]}, horovod"
        items = self.content.keys["run"].items
        for number, item in enumerate(items, 1):
            distributed = "distributed" in item.keys
            command = item.keys["distributed"] if distributed else item
            line = spec.lines.add(distributed=distributed, title=f"line {number} of {len(items)}")
            if isinstance(command.data, list):
                line.command.extend(one.text for one in command.items)
                line.shown = shlex.join(line.command)
            else:
                line.command.extend(["sh", "-c", command.data])
                line.shown = " ".join(command.data.split())
        if spec.policy.replaces_failed:
            _make_one_line(spec)
        return spec

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _workers(self) -> int:
        """With how many the job begins."""
        found = self.content.keys["workers"].data
        return int(found["min"] if isinstance(found, dict) else found)

    def _get(self, key: str, default: Any = None) -> Any:
        found = self.content.keys.get(key)
        return default if found is None else found.data

    def _texts(self, key: str) -> dict[str, str]:
        """The values as they are written: 010 is not 8, and yes is not true."""
        found = self.content.keys.get(key)
        return {} if found is None else {name: value.text for name, value in found.keys.items()}

    def _memory(self) -> int:
        number, unit = re.fullmatch(r"([0-9.]+) ?([A-Za-z]+)", self._get("memory", "0 MB")).groups()  # type: ignore[union-attr]
        return int(float(number) * _UNITS[unit])

    def _environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        found = self.content.keys.get("env")
        texts, missing = self._texts("env"), []
        for name, value in found.keys.items() if found else ():
            if value.data is None:
                if name in environ:
                    texts[name] = environ[name]
                else:
                    missing.append((found.key_lines[name], name))  # type: ignore[union-attr]
        if missing:
            raise LineError(
                [
                    f"{self.path}, line {line}: {name} has no value here, and there is no variable of that name in "
                    "this shell. Export it, or write a value."
                    for line, name in missing
                ]
            )
        return texts

    def _problems(self) -> list[tuple[int, str]]:
        """The mistakes that the schema can't express."""
        keys = self.content.keys
        found: list[tuple[int, str]] = []
        each, workers = int(self._get("processes", 1)), self._workers

        def wrong(key: str, sentence: str) -> None:
            found.append((self.line_of(key), sentence))

        if "image" in keys and "environment" in keys:
            wrong("image", "'image' and 'environment' exclude each other: an image brings its own Python.")
        if "code" in keys and "directory" in keys:
            wrong("directory", "'directory' and 'code' exclude each other: code runs in a folder of its worker.")
        if workers * each > _MAX_PROCESSES:
            wrong("workers", f"{workers} workers of {each} processes are too many: at most {_MAX_PROCESSES} processes.")
        if int(self._get("slots", each)) < each:
            wrong("slots", f"a worker of {each} processes needs as many slots, not {self._get('slots')}.")
        if (gpus := int(self._get("gpus", 0))) % each:
            wrong("gpus", f"{gpus} GPUs can't be dealt out to {each} processes: expected a multiple of {each}.")
        if "image" in keys and "image" in self._texts("labels"):
            wrong("image", "'image' is also a label in this file: leave one of them out.")
        if not any("distributed" in item.keys for item in keys["run"].items):
            wrong("run", "no line is distributed: write the line that trains as `- distributed: python train.py`.")
        if isinstance(keys["workers"].data, dict):
            found += self._problems_of_sizes(each)
        for name, line in keys["env"].key_lines.items() if "env" in keys else ():
            if not _VARIABLE.fullmatch(name):
                found.append((line, f"{name!r} is no name of an environment variable."))
        return found

    def _problems_of_sizes(self, each: int) -> Iterator[tuple[int, str]]:
        keys, workers = self.content.keys, self.content.keys["workers"]
        if "max" in workers.keys and workers.keys["max"].data < workers.keys["min"].data:
            fewest, most = workers.keys["min"].text, workers.keys["max"].text
            yield workers.key_lines["max"], f"'workers.max' is {most}: expected at least 'workers.min', {fewest}."
        if "cooldown" in workers.keys and workers.keys["cooldown"].data != sorted(workers.keys["cooldown"].data):
            yield workers.key_lines["cooldown"], "'workers.cooldown' has the larger number first: write it last."
        if each > 1:
            sentence = "if the number of workers may change, each worker has one process: leave 'processes' out."
            yield self.line_of("processes"), sentence
        for item in [item for item in keys["run"].items[:-1] if "distributed" in item.keys]:
            sentence = "if the number of workers may change, the last line must be distributed, and no other line"
            yield item.line, f"{sentence}: a worker that comes later has nobody to run other lines with."


def _make_one_line(spec: jobs_pb2.JobSpec) -> None:
    """Each process runs the lines before the distributed one by itself, since it may come at any time."""
    *before, trains = spec.lines
    if before:
        first = " && ".join(shlex.join(line.command) for line in before)
        script = f"(unset {' '.join(_OF_A_RANK)}; {first}) && exec {shlex.join(trains.command)}"
        trains.command[:] = ["sh", "-c", script]
        trains.title, trains.shown = "the run list", " && ".join(line.shown for line in spec.lines)
    one = jobs_pb2.Line()
    one.CopyFrom(trains)
    del spec.lines[:]
    spec.lines.append(one)


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
