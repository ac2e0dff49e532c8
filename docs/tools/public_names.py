"""The public names of a package and the definition of each, found by reading sources; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Found(NamedTuple):
    """A definition, and the module that has it. node: None for a module, or for a value without a docstring."""

    module: str
    node: ast.ClassDef | ast.FunctionDef | None


def source(module: str) -> Path:
    """The file of a module of horovod."""
    parts = module.split(".")
    if parts[1:2] in (["base"], ["worker"], ["coordinator"]):
        path = ROOT.joinpath(*parts[1:])
    else:
        path = ROOT.joinpath("clients", *parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(source(module).read_text(encoding="utf-8"))


def names(module: str) -> list[str]:
    """`__all__` of a module, with the lists of other modules that are part of it."""
    found: list[str] = []
    aliases = {}
    for node in _statements(tree(module).body):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for one in node.names:
                aliases[one.asname or one.name] = f"{node.module}.{one.name}"
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not (isinstance(target, ast.Name) and target.id == "__all__"):
            continue
        assert isinstance(node, ast.Assign | ast.AugAssign)
        for entry in getattr(node.value, "elts", []):
            if isinstance(entry, ast.Constant):
                found.append(str(entry.value))
            else:  # *other.__all__
                found += names(aliases[entry.value.value.id])
    return list(dict.fromkeys(found))


def find(module: str, name: str) -> Found:
    """The definition of a module's name, through imports. LookupError: it has none."""
    if not source(module).exists():  # compiled
        return Found(module, None)
    best: Found | None = None
    for node in _statements(tree(module).body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            best = Found(module, node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(one, ast.Name) and one.id == name for one in targets):
                best = Found(module, None)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horovod"):
            assert node.module is not None
            for one in node.names:
                if (one.asname or one.name) == name:
                    inner = f"{node.module}.{one.name}"
                    best = Found(inner, None) if source(inner).exists() else find(node.module, one.name)
                elif one.name == "*" and best is None and name in names(node.module):
                    best = find(node.module, name)
    if best is None:
        raise LookupError(f"{module} has no {name}")
    return best


def _statements(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a module, also those below `if`, `try` and `else`."""
    for node in nodes:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
