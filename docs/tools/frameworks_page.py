"""docs/frameworks.md, made from the code: `python docs/tools/frameworks_page.py > docs/frameworks.md`.

What the modules export and which options it takes is read from their text: no framework is imported. framework_holes.py
says what has another name in a framework, and why what is missing is missing. A name or an option that is new in one
framework is a row on the page, and an error here until the others have it too or framework_holes.py says why not. A
reason for what is there by now is an error as well.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import framework_holes as holes

from horovod.base.frameworks import WITH_AN_API

# Column, module, and its submodules with public names of their own.
FRAMEWORKS = {one.name: f"horovod.{one.module}" for one in WITH_AN_API}
_PARTS = ("elastic", "callbacks")
_BEGIN = """# What each framework has

Made from the sources by `python docs/tools/frameworks_page.py > docs/frameworks.md`; a test compares the two.

`yes`: available under this name. Another name: use that one. A number: not available; see [the reason](#reasons).
Keras is `horovod.keras`; `horovod.tensorflow.keras` has the same names. The [API](api.md) explains each name.
"""


@functools.cache
def public(framework: str) -> frozenset[str]:
    """The names of a framework's module; those of its submodules with a dot."""
    module = FRAMEWORKS[framework]
    names = set(module_source(module).exported) | set(holes.MORE.get(framework, ()))
    for part in _PARTS:
        names |= {f"{part}.{name}" for name in module_source(f"{module}.{part}").exported}
    return frozenset(names - set(_PARTS))


def instead(framework: str, row: str) -> tuple[str, ...]:
    """What a framework has for a row; nothing if it has not."""
    given = holes.INSTEAD.get(row, {}).get(framework, (row,))
    missing = [name for name in given if name not in public(framework) and name != row]
    assert not missing, f"framework_holes.py says that {framework} has {missing} in place of {row}, which it has not"
    return tuple(name for name in given if name in public(framework))


def rows() -> list[str]:
    """All names, but for those that stand for another one."""
    taken = {(framework, name) for row in holes.INSTEAD for framework in FRAMEWORKS for name in instead(framework, row)}
    kept = set(holes.INSTEAD) | {
        name for framework in FRAMEWORKS for name in public(framework) if (framework, name) not in taken
    }
    return sorted(kept, key=lambda name: (name.partition(".")[0] in _PARTS, name.lower(), name))


def markdown() -> str:
    """The page. AssertionError for a hole without a reason, and for a reason without a hole."""
    reasons = _Reasons()
    everywhere = [row for row in rows() if all(instead(framework, row) == (row,) for framework in FRAMEWORKS)]
    lines = [_BEGIN, "## Names", "", f"In all of them: {_listed(everywhere)}.", ""]
    lines += _head("name")
    for row in rows():
        if row not in everywhere:
            cells = [_named(framework, row) or reasons.number(framework, row) for framework in FRAMEWORKS]
            lines.append(_line(f"`{row}`", cells))
    found = _options(reasons)
    lines += ["", "## Options", "", "Of names that several frameworks have. `-`: the framework has no such name.", ""]
    lines += _head("option", "of")
    for option, where, cells in found:
        if not _is_shared(cells):
            lines.append(_line(f"`{option}` | {_listed(where)}", cells))
    lines += ["", "These options are there in every framework that has the name:", ""]
    shared = [(name, option) for option, where, cells in found if _is_shared(cells) for name in where]
    for name in sorted({name for name, _ in shared}, key=rows().index):
        lines.append(f"* `{name}`: {_listed(option for owner, option in shared if owner == name)}")
    lines += ["", "## Reasons", "", *reasons.lines()]
    reasons.check()
    return "\n".join(lines) + "\n"


def _named(framework: str, row: str) -> str:
    return ", ".join("yes" if name == row else f"`{name}`" for name in instead(framework, row))


def _is_shared(cells: Iterable[str]) -> bool:
    return set(cells) <= {"yes", "-"}


def _options(reasons: _Reasons) -> list[tuple[str, list[str], list[str]]]:
    """Option, the names that have it, and the cells, which are the same for all of these names."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in rows():
        has = {framework: _takes(framework, row) for framework in FRAMEWORKS if row in instead(framework, row)}
        if len(has) < 2:
            continue
        optional = {option for taken in has.values() for option, may_be_left_out in taken.items() if may_be_left_out}
        for option in sorted(optional):
            cells = tuple(_option(reasons, framework, row, option, has.get(framework)) for framework in FRAMEWORKS)
            found.setdefault((option, cells), []).append(row)
    return [(option, where, list(cells)) for (option, cells), where in sorted(found.items())]


def _takes(framework: str, row: str) -> dict[str, bool]:
    """The arguments of all that stands for a row, and whether each may be left out."""
    module = FRAMEWORKS[framework]
    taken: dict[str, bool] = {}
    for name in instead(framework, row):
        part, _, short = name.rpartition(".")
        taken |= options(f"{module}.{part}" if part else module, short) | dict.fromkeys(values(module, name), True)
    return taken


def _option(reasons: _Reasons, framework: str, row: str, option: str, has: dict[str, bool] | None) -> str:
    if has is None:
        return "-"
    if option in has or (row, framework) in holes.AS_THE_BACKEND:
        return "yes"
    return reasons.number(framework, f"{row}({option})")


class _Reasons:
    """Numbers for reasons, in the order in which the page meets them."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._used: set[tuple[str, str]] = set()

    def number(self, framework: str, hole: str) -> str:
        for pattern, reasons in holes.REASONS.items():
            if framework in reasons and fnmatchcase(hole, pattern):
                self._used.add((pattern, framework))
                return str(self._numbers.setdefault(reasons[framework], len(self._numbers) + 1))
        raise AssertionError(f"{framework} has no {hole}: write it, or say in docs/tools/framework_holes.py why not")

    def check(self) -> None:
        unused = {(pattern, name) for pattern, reasons in holes.REASONS.items() for name in reasons} - self._used
        assert not unused, f"framework_holes.py gives reasons for what is there, or is nowhere: {sorted(unused)}"

    def lines(self) -> Iterable[str]:
        return (f"{number}. {reason}" for reason, number in self._numbers.items())


def _head(*first: str) -> list[str]:
    columns = [*first, *FRAMEWORKS]
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _line(first: str, cells: Sequence[str]) -> str:
    return f"| {first} | {' | '.join(cells)} |"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# -- what the modules say ----------------------------------------------------------------------------------------------
_PACKAGE = Path(__file__).parents[2] / "clients" / "horovod"

Definition = ast.FunctionDef | ast.ClassDef


class ModuleSource:
    """A module of this package, by its name: "horovod.torch"."""

    def __init__(self, name: str) -> None:
        path = _PACKAGE.joinpath(*name.split(".")[1:])
        self._file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self.exists = self._file.exists()
        self._tree = ast.parse(self._file.read_text() if self.exists else "")

    @functools.cached_property
    def exported(self) -> list[str]:
        """What `__all__` says."""
        names: list[str] = []
        for node in ast.walk(self._tree):
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=elements))
                    | ast.AugAssign(target=ast.Name(id="__all__"), value=ast.List(elts=elements))
                ):
                    names += [name for element in elements for name in self._names_of(element)]
        return names

    def _names_of(self, element: ast.expr) -> list[str]:
        match element:
            case ast.Constant(value=str(name)):
                return [name]
            case ast.Starred(value=ast.Attribute(value=ast.Name(id=module), attr="__all__")):
                return module_source(self._imports[module]).exported
        raise AssertionError(f"{self._file}: {ast.unparse(element)} in __all__ is not understood")

    @functools.cached_property
    def _imports(self) -> dict[str, str]:
        """A name that is imported, and its full name where it comes from."""
        return {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(self._tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }

    def definition(self, name: str) -> Definition | None:
        """The function or class of that name, wherever it is imported from; None for a value."""
        for node in self._tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return node
        if (whole := self._imports.get(name)) is not None:
            module, _, original = whole.rpartition(".")
            return module_source(module).definition(original) if module_source(module).exists else None
        for node in self._tree.body:
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                starred = module_source(node.module)
                if name in starred.exported:
                    return starred.definition(name)
        return None


@functools.cache
def module_source(name: str | None) -> ModuleSource:
    assert name is not None, "relative imports are not understood"
    return ModuleSource(name)


def options(module: str, name: str) -> dict[str, bool]:
    """The arguments of a function or of a class's constructor, and whether each may be left out."""
    definition = module_source(module).definition(name)
    if isinstance(definition, ast.ClassDef):
        made = (node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
        definition = next(made, None)
    if definition is None:
        return {}
    plain, named = definition.args.args, definition.args.kwonlyargs
    required = len(plain) - len(definition.args.defaults)
    return {argument.arg: place >= required for place, argument in enumerate(plain)} | {
        argument.arg: default is not None for argument, default in zip(named, definition.args.kw_defaults, strict=True)
    }


def values(module: str, name: str) -> list[str]:
    """What a class holds as attributes: Compression.none, Compression.fp16 ..."""
    definition = module_source(module).definition(name)
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return [target.id for target in targets if isinstance(target, ast.Name) and not target.id.startswith("_")]


if __name__ == "__main__":
    print(markdown(), end="")
