"""Imports point down: which room of the product may import which, and no circles. CONTRIBUTING.md says it in words.

A room is a package with all that is in it, but for the packages in it that are rooms of their own. ROOMS has them from
low to high. What a room imports late, inside a function, counts as well; what only type checkers see does not close a
circle.
"""

from __future__ import annotations

import ast
import collections
import functools
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

import networkx
import pytest

from horovod.base.frameworks import WITH_AN_API

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = {
    "horovod": ROOT / "clients/horovod",
    "horovod.base": ROOT / "base",
    "horovod.coordinator": ROOT / "coordinator",
    "horovod.worker": ROOT / "worker",
}
NATIVE: Final = ("horovod._core", "horovod.protos")  # made by the build

_LOW: Final = "base protos grpc_output"
_CLIENT: Final = f"{_LOW} worker worker.runtime common"
_LAUNCH: Final = f"{_LOW} coordinator coordinator.core worker worker.runtime worker.agent rendezvous"
_SHARED: Final = "launch launch.command_line launch.console launch.elastic"
_LAUNCHERS: Final = f"{_LAUNCH} {_SHARED} launch.local launch.cluster launch.hosts launch.ssh"

# Each room without "horovod.", and the rooms that it may import, all of which stand above it in this table.
ROOMS: Final[Mapping[str, str]] = {
    "protos": "",
    "_core": "",
    "base": "protos",
    "grpc_output": "",
    "coordinator.core": "base protos",
    "coordinator.store": "base protos",
    "coordinator": f"{_LOW} coordinator.core coordinator.store",  # its services and pages too
    "worker.runtime": f"{_LOW} _core",
    "worker": _LOW,
    "worker.agent": f"{_LOW} worker worker.runtime",
    "rendezvous": f"{_LOW} coordinator worker.runtime",
    "common": f"{_LOW} _core worker.runtime rendezvous",
    "_keras": f"{_CLIENT} _core",
    **{one.module: f"{_CLIENT} _core" for one in WITH_AN_API if one.module not in ("keras", "tensorflow")},
    "torch.distributed": f"{_CLIENT} _core rendezvous torch",  # forms a world of processes that torch knows already
    "tensorflow.order": "",
    "tensorflow": f"{_CLIENT} _core _keras tensorflow.order",
    "tensorflow.data": f"{_CLIENT} tensorflow",
    "_keras.adapters": f"{_CLIENT} _core jax tensorflow torch _keras",
    "tensorflow.keras": f"{_CLIENT} _keras tensorflow",
    "keras": f"{_CLIENT} _keras tensorflow",
    "data": "base",
    "lightning": f"{_CLIENT} torch",
    "launch.located": "base",
    "launch.command_line": f"{_LOW} _core rendezvous launch.located",
    "launch.console": f"{_LOW} coordinator.core worker.agent",
    "launch.elastic": f"{_LAUNCH} launch.console",
    "launch": f"{_LAUNCH} launch.command_line launch.console launch.elastic",  # what its launchers share
    "launch.local": f"{_LAUNCH} launch launch.console launch.elastic",
    "launch.cluster": f"{_LAUNCH} launch launch.console launch.elastic launch.located",
    "launch.hosts": f"{_LAUNCH} launch launch.console launch.elastic launch.cluster",
    "launch.ssh": f"{_LAUNCH} launch launch.hosts",
    "launch.function": f"{_LAUNCH} {_SHARED}",  # its launcher is one of the list
    "launch.commands": _LAUNCHERS,
    "launch.check": "base launch.command_line",
    "launch.__main__": f"{_LAUNCHERS} launch.check launch.commands launch.function",
    "runner": f"{_LAUNCH} common launch launch.elastic launch.__main__ launch.function",
    "ray": f"{_LAUNCH} common launch launch.elastic runner",
    "spark": f"{_LAUNCH} common launch launch.elastic launch.console launch.function runner data lightning torch "
    "tensorflow tensorflow.data _keras",
    "": "base launch.function",  # the package `horovod` itself
}

# Arrows in a circle, each with the public name that needs it. Anything else is moved to where it belongs.
ALLOWED: Final[Mapping[tuple[str, str], str]] = {
    ("horovod.torch", "horovod.torch.mpi_ops"): "scripts write hvd.mpi_ops.Sum",
    ("horovod.tensorflow", "horovod.tensorflow.mpi_ops"): "as in horovod.torch",
    ("horovod.common.basics", "horovod.common.compatibility"): "basics.HorovodBasics is an older name",
}


class Kind(IntEnum):
    """Of an import; the lower, the earlier it runs."""

    TOP = 0
    LATE = 1  # in a function
    TYPES = 2  # for type checkers


class Import(NamedTuple):
    source: str
    target: str
    kind: Kind


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for package, folder in SOURCES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])
            found[name] = path
    return found


def statements(node: ast.AST, kind: Kind = Kind.TOP) -> Iterator[tuple[ast.Import | ast.ImportFrom, Kind]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, kind
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from statements(child, max(kind, Kind.LATE))
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from statements(ast.Module(child.body, []), Kind.TYPES)
            yield from statements(ast.Module(child.orelse, []), kind)
        else:
            yield from statements(child, kind)


def names(module: str, statement: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    package = statement.module or ""
    if statement.level:
        parts = module.split(".")
        if modules()[module].name == "__init__.py":
            parts.append("")
        package = ".".join([*parts[: -statement.level], package]).rstrip(".")
    return [f"{package}.{alias.name}" for alias in statement.names]


def module_of(name: str) -> str | None:
    """The module that has this name, or in which it stands; None if that is not Horovod's."""
    if native := next((one for one in NATIVE if name == one or name.startswith(f"{one}.")), None):
        return native
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or None


@functools.cache
def imports() -> list[Import]:
    """All of the product, each once: as the earliest that there is."""
    found: dict[tuple[str, str], Kind] = {}
    for source, path in modules().items():
        for statement, kind in statements(ast.parse(path.read_text())):
            for name in names(source, statement):
                target = module_of(name)
                if target is not None and target != source:
                    found[source, target] = min(kind, found.get((source, target), kind))
    return [Import(*ends, kind) for ends, kind in sorted(found.items())]


def room_of(module: str) -> str:
    parts = module.split(".")[1:]
    return next(room for end in range(len(parts), -1, -1) if (room := ".".join(parts[:end])) in ROOMS)


def against_the_table() -> list[Import]:
    def is_allowed(one: Import) -> bool:
        source, target = room_of(one.source), room_of(one.target)
        return source == target or target in ROOMS[source].split()

    return [one for one in imports() if not is_allowed(one)]


def circles() -> list[list[str]]:
    """Modules that import each other, but for ALLOWED."""
    graph = networkx.DiGraph(
        (one.source, one.target)
        for one in imports()
        if one.kind is not Kind.TYPES and (one.source, one.target) not in ALLOWED
    )
    return [sorted(one) for one in networkx.strongly_connected_components(graph) if len(one) > 1]


def test_the_table_names_rooms_that_are_there_and_points_up() -> None:
    order = list(ROOMS)
    for room, lower in ROOMS.items():
        assert f"horovod.{room}".rstrip(".") in {*modules(), *NATIVE}, room
        for one in lower.split():
            assert one in ROOMS, f"{room} may import {one}, which is no room"
            assert order.index(one) < order.index(room), f"{room} may import {one}, which stands above it"


def test_rooms_import_what_the_table_says() -> None:
    wrong = [one for one in against_the_table() if (one.source, one.target) not in ALLOWED]
    assert not wrong, "\n".join(
        f"{one.source} imports {one.target} ({one.kind.name.lower()}); horovod.{room_of(one.source)} may import "
        f"{ROOMS[room_of(one.source)] or 'nothing'}. Move what is needed to a lower room."
        for one in wrong
    )


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = circles()
    assert not found, "\n".join(f"in a circle: {', '.join(one)}" for one in found)


@pytest.mark.parametrize("ends", ALLOWED, ids=" to ".join)
def test_what_is_allowed_is_still_needed(ends: tuple[str, str]) -> None:
    assert any(ends == one[:2] for one in imports()), "there is no such import any more: remove the row"


def test_imports_are_found_wherever_they_stand() -> None:
    source = "import a\nif TYPE_CHECKING: import b\nelse: import c\ndef f():\n    class C:\n        from .. import d"
    kinds = {ast.unparse(one): kind for one, kind in statements(ast.parse(source))}
    assert kinds == {
        "import a": Kind.TOP,
        "import b": Kind.TYPES,
        "import c": Kind.TOP,
        "from .. import d": Kind.LATE,
    }
    of = {(one.source, one.target): one.kind for one in imports()}
    assert of["horovod.torch", "horovod.torch.mpi_ops"] is Kind.TOP
    assert of["horovod", "horovod.launch.function"] is Kind.LATE
    assert len(of) > 2000
    assert collections.Counter(map(room_of, modules()))["launch.hosts"] > 3


def test_no_package_has_a_name_that_one_of_its_modules_takes_from_it() -> None:
    """Importing the module `launch` of a package puts it in the place of a function `launch` in the package."""
    found = []
    for module, path in modules().items():
        if path.name == "__init__.py":
            for node in ast.parse(path.read_text()).body:
                name = getattr(node, "name", "") if not isinstance(node, (ast.Import, ast.ImportFrom)) else ""
                if f"{module}.{name}" in modules():
                    found.append(f"{module}.{name} is a module and a {type(node).__name__} of the package")
    assert not found
