"""The API of the frameworks as Markdown, made from the sources: `python docs/tools/frameworks_api_page.py` writes it.

One page for each framework, and one for the names that all frameworks share: readers of the repository see them without
`make docs`. Nothing is imported but the table of what collectives take, return and raise.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from public_names import ROOT, Found, find, names

SHARED = "horovod.common.names"
# Each page: its name in docs/, its title, and the modules whose names it has.
PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "api-torch": (
        "API of horovod.torch",
        ("horovod.torch", "horovod.torch.elastic", "horovod.torch.compression"),
    ),
    "api-tensorflow": (
        "API of horovod.tensorflow",
        (
            *("horovod.tensorflow", "horovod.tensorflow.elastic", "horovod.tensorflow.compression"),
            "horovod.tensorflow.data.compute_service",
        ),
    ),
    "api-keras": (
        "API of horovod.keras",
        ("horovod.keras", "horovod.keras.callbacks", "horovod.keras.elastic"),
    ),
    "api-jax": (
        "API of horovod.jax",
        (
            *("horovod.jax", "horovod.jax.elastic", "horovod.jax.compression"),
            *("horovod.jax.linen", "horovod.jax.nnx"),
        ),
    ),
    "api-mxnet": ("API of horovod.mxnet", ("horovod.mxnet", "horovod.mxnet.elastic")),
    "api-shared": (
        "API that all frameworks share",
        (SHARED, "horovod", "horovod.data", "horovod.lightning"),
    ),
}
# Functions whose docstring is assigned from another one; and a factory whose result has methods that users call.
DOCSTRINGS = {
    "horovod.keras.DistributedOptimizer": ("horovod._keras.api", "DistributedOptimizer"),
    "horovod.keras.load_model": ("horovod._keras.api", "load_model"),
}
METHODS_OF = {"horovod.torch.DistributedOptimizer": ("horovod.torch.optimizer", "_DistributedOptimizer")}


class Entry(NamedTuple):
    """A public name: where it is imported from, its definition, and its whole docstring."""

    module: str
    name: str
    found: Found
    doc: str


def _faces() -> Any:
    if "horovod_faces" not in sys.modules:
        spec = importlib.util.spec_from_file_location("horovod_faces", ROOT / "clients/horovod/common/ops/faces.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    return sys.modules["horovod_faces"]


def entries(module: str) -> Iterator[Entry]:
    """Public names of a module; of a framework without those that all frameworks share."""
    shared = set() if module == SHARED else set(names(SHARED))
    for name in sorted(set(names(module)) - shared, key=str.lower):
        found = find(module, name)
        told = find(*DOCSTRINGS.get(f"{module}.{name}", (module, name))).node
        doc = (told and ast.get_docstring(told)) or ""
        words = _faces().words_of(found.module)
        if words is not None and isinstance(found.node, ast.FunctionDef) and _faces().operation_of(name):
            doc = _faces().whole(words, name, [one.arg for one in arguments(found.node)], doc)
        yield Entry(module, name, found, doc)


def arguments(function: ast.FunctionDef) -> list[ast.arg]:
    """Those that a caller gives."""
    given = function.args
    return [one for one in (*given.posonlyargs, *given.args, *given.kwonlyargs) if one.arg not in ("self", "cls")]


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """Public ones with a docstring, in the order of their names."""
    found = [one for one in node.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
    found = [one for one in found if ast.get_docstring(one) and not _is_setter(one)]
    return sorted(found, key=lambda one: one.name)


def _is_setter(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).endswith(".setter") for one in function.decorator_list)


def markdown(page: str) -> str:
    """A page."""
    title, modules = PAGES[page]
    blocks = [f"# {title}\n"]
    if page == "api-shared":
        what = "horovod.torch as hvd  # or horovod.tensorflow, .keras, .jax, .mxnet"
        blocks.append(f"\n```python\nimport {what}\n\nhvd.init()\n```\n")
    else:
        blocks.append(f"\n```python\nimport {modules[0]} as hvd\n\nhvd.init()\n```\n")
    blocks.append(
        "\nMade from the sources by `python docs/tools/frameworks_api_page.py`; a test compares them. All pages of the"
        " API: [API](api.md).\n"
    )
    if page != "api-shared":
        blocks.append("`hvd.init`, `hvd.rank`, process sets and the names of reductions: [shared](api-shared.md).\n")
    for module in modules:
        found = list(entries(module))
        blocks.append(f"\n## {'Names of every framework' if module == SHARED else module}\n")
        if values := [f"`{one.name}`" for one in found if one.found.node is None and one.name != "__version__"]:
            blocks.append(f"\nValues and modules: {', '.join(values)}.\n")
        blocks += [_entry(one) for one in found if one.found.node is not None]
    return "".join(blocks)


def _entry(entry: Entry) -> str:
    node = entry.found.node
    assert node is not None
    blocks = [f"\n### {entry.name}\n"]
    if isinstance(node, ast.FunctionDef):
        blocks += [_signature(entry.name, node), _text(entry.doc)]
    else:
        init = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
        if init is not None:
            blocks.append(_signature(entry.name, init))
            blocks.append(_text("\n\n".join(filter(None, [entry.doc, ast.get_docstring(init) or ""]))))
        else:
            blocks.append(_text(entry.doc))
    more = METHODS_OF.get(f"{entry.module}.{entry.name}")
    owner = find(*more).node if more else node
    if isinstance(owner, ast.ClassDef):
        for method in methods(owner):
            blocks.append(f"\n#### {entry.name}.{method.name}\n")
            blocks += [_signature(method.name, method), _text(ast.get_docstring(method) or "")]
    return "".join(blocks)


def _signature(name: str, function: ast.FunctionDef) -> str:
    result = "" if name[:1].isupper() or function.returns is None else f" -> {ast.unparse(function.returns)}"
    text = ast.unparse(function.args)
    text = re.sub(r"^(self|cls)(, |$)", "", text)
    if any(ast.unparse(one) in ("property", "cached_property") for one in function.decorator_list):
        return f"\n```text\n{name}{result.replace(' -> ', ': ')}\n```\n"
    line = f"{name}({text}){result}"
    return "\n```text\n" + "\n".join(textwrap.wrap(line, 110, subsequent_indent="    ")) + "\n```\n"


_ITEM = re.compile(r"^    (?=[\w*\"][^:\n]*: )", re.MULTILINE)


def _text(doc: str) -> str:
    """A docstring as Markdown."""
    blocks = []
    for block in re.split(r"\n\s*\n", doc.strip()):
        before, example = _without_example(block)
        heading, _, rest = before.partition("\n")
        if heading in ("Args:", "Raises:"):
            items = [" ".join(one.split()) for one in _ITEM.split(rest) if one.strip()]
            pairs = [one.split(": ", 1) for one in items]
            rows = [f"* `{one[0]}`: {_plain(one[1])}" if len(one) > 1 else f"* {_plain(one[0])}" for one in pairs]
            blocks.append(f"**{'Arguments' if heading == 'Args:' else 'Raises'}**\n\n" + "\n".join(rows))
        elif heading == "Returns:":
            blocks.append(f"**Returns** {_plain(' '.join(rest.split()))}")
        elif before.strip() and all(line.startswith("    ") for line in before.splitlines()):
            blocks.append(f"```text\n{textwrap.dedent(before)}\n```")
        elif before.strip():
            blocks.append(_plain(textwrap.dedent(before).strip()))
        if example:
            blocks.append(f"```pycon\n{textwrap.dedent(example).rstrip()}\n```")
    return "\n" + "\n\n".join(blocks) + "\n" if blocks else ""


def _without_example(block: str) -> tuple[str, str]:
    """The text of a block and the example at its end."""
    lines = block.splitlines()
    first = next((number for number, line in enumerate(lines) if line.lstrip().startswith(">>>")), len(lines))
    return "\n".join(lines[:first]), "\n".join(lines[first:])


def _plain(text: str) -> str:
    parts = re.split(r"(`[^`]*`)", text.replace("``", "`"))
    escaped = [one if one.startswith("`") else re.sub(r"([<*_])", r"\\\1", one) for one in parts]
    return "".join(escaped)


if __name__ == "__main__":
    for one in PAGES:
        (ROOT / "docs" / f"{one}.md").write_text(markdown(one), encoding="utf-8")
