"""The public names of a module and the options of each, read from the source file: nothing is imported."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]

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
