"""A Python source and the full names of what it uses, as far as its imports say them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator


class Script:
    """A parsed source. SyntaxError or ValueError where it is none."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self._aliases: dict[str, str] = {}
        self.imported: dict[
            str, int
        ] = {}  # full name of each imported module or name, and the line of its first import
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for one in node.names:
                    self.imported.setdefault(one.name, node.lineno)
                    top = one.name.partition(".")[0]
                    self._aliases[one.asname or top] = one.name if one.asname else top
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self.imported.setdefault(node.module, node.lineno)
                for one in node.names:
                    self.imported.setdefault(f"{node.module}.{one.name}", node.lineno)
                    self._aliases[one.asname or one.name] = f"{node.module}.{one.name}"

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @functools.cached_property
    def calls(self) -> list[ast.Call]:
        """All calls."""
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @functools.cached_property
    def text_constants(self) -> frozenset[str]:
        """All texts in it."""
        return frozenset(
            node.value for node in self.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )

    def name(self, node: ast.AST) -> str:
        """The full name of what `node` is, such as "torch.nn.Linear"; "" where its imports do not say."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._aliases:
            return ""
        return ".".join([self._aliases[node.id], *reversed(parts)])

    def imports(self, *modules: str) -> bool:
        """Whether it imports one of them, or something of one."""
        return any(name == one or name.startswith(f"{one}.") for name in self.imported for one in modules)

    def uses(self) -> Iterator[tuple[str, int]]:
        """The full name and line of everything that it imports, or takes from something imported."""
        yield from self.imported.items()
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and (name := self.name(node)):
                yield name, node.lineno

    def outside_main(self) -> Iterator[ast.AST]:
        """What runs when the module is imported: all but functions, classes and `if __name__ == "__main__":`."""
        waiting: list[ast.AST] = list(self.tree.body)
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                continue
            if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
                continue
            yield node
            waiting.extend(ast.iter_child_nodes(node))


def text_of(node: ast.AST | None) -> str | None:
    """The value of a text that is written out; None of anything else."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def keyword_of(call: ast.Call, name: str) -> ast.expr | None:
    """What the call gives for the keyword; None where it does not."""
    return next((one.value for one in call.keywords if one.arg == name), None)
