"""docs/api-clusters.md, made from the sources: `python docs/tools/api_page.py > docs/api-clusters.md`.

The public names of horovod.ray and horovod.spark, of estimators and stores, and the exceptions, as Markdown for readers
of the repository. Sources are read and not imported, so neither Ray nor Spark need be installed. A parameter gets its
meaning from `name: meaning` in the docstring of the function or its class, or from a Param of Spark ML.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CLIENTS = Path(__file__).resolve().parents[2] / "clients" / "horovod"
_BEGIN = """# API of Ray, Spark, estimators, stores and errors

Made from the sources by `python docs/tools/api_page.py > docs/api-clusters.md`; a test compares the two.
How to use them: [Ray](ray.md), [Spark](spark.md), [data sets](data.md),
[error codes](errors.md). The API of the frameworks: [API](api.md).
"""
# Heading, module, and the file and name of each object; Name() stands for a class whose methods are those of its base.
SECTIONS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "horovod.ray",
        "horovod.ray",
        (("ray/runner.py", "RayExecutor"), ("ray/elastic.py", "ElasticRayExecutor")),
    ),
    (
        "horovod.ray.tune",
        "horovod.ray.tune",
        (("ray/tune.py", "trainable"), ("ray/tune.py", "report"), ("ray/tune.py", "get_checkpoint")),
    ),
    ("horovod.ray.train", "horovod.ray.train", (("ray/train.py", "HorovodConfig"),)),
    ("horovod.ray.ray_logger", "horovod.ray.ray_logger", (("ray/ray_logger.py", "log"),)),
    ("horovod.spark", "horovod.spark", (("spark/runner.py", "run"), ("spark/runner.py", "run_elastic"))),
    ("All estimators", "horovod.spark.common.estimator", (("spark/common/estimator.py", "HorovodEstimator"),)),
    (
        "Estimators for PyTorch",
        "horovod.spark.torch",
        (("spark/torch/estimator.py", "TorchEstimator"), ("spark/torch/estimator.py", "TorchModel")),
    ),
    (
        "Estimators for Keras",
        "horovod.spark.keras",
        (("spark/keras/estimator.py", "KerasEstimator"), ("spark/keras/estimator.py", "KerasModel")),
    ),
    (
        "Estimators for Lightning",
        "horovod.spark.lightning",
        (("spark/lightning/estimator.py", "TorchEstimator"), ("spark/torch/estimator.py", "TorchModel")),
    ),
    (
        "Stores",
        "horovod.spark.common.store",
        (
            ("spark/common/store/base.py", "Store"),
            ("spark/common/store/filesystem.py", "FilesystemStore()"),
            ("spark/common/store/filesystem.py", "LocalStore()"),
            ("spark/common/store/filesystem.py", "DBFSLocalStore()"),
            ("spark/common/store/hdfs.py", "HDFSStore()"),
        ),
    ),
    (
        "Backends of estimators",
        "horovod.spark.common.backend",
        (
            ("spark/common/backend.py", "Backend"),
            ("spark/common/backend.py", "SparkBackend()"),
            ("spark/common/backend.py", "LocalBackend()"),
        ),
    ),
    (
        "Errors",
        "horovod.common.exceptions",
        (
            ("common/exceptions.py", "HorovodInternalError"),
            ("common/exceptions.py", "HostsUpdatedInterrupt"),
            ("common/exceptions.py", "HorovodVersionMismatchError"),
        ),
    ),
)
# Estimators have setters and getters of each parameter, and methods for subclasses; a user calls these.
_OF_ESTIMATORS = ("fit", "fit_on_parquet", "transform")
_ML = ("spark/common/params.py", "spark/common/estimator.py", "spark/torch/estimator.py")


@dataclass(frozen=True)
class Parameter:
    name: str
    default: str | None  # None: it must be given
    meaning: str | None  # None: nowhere


@cache
def _module(file: str) -> ast.Module:
    return ast.parse((CLIENTS / file).read_text(encoding="utf-8"))


def _find(file: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    for node in _module(file).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
    raise LookupError(f"{file} has no {name}: correct SECTIONS of docs/tools/api_page.py.")


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [one for one in node.body if isinstance(one, ast.FunctionDef)]


def parameters_of(function: ast.FunctionDef, docs: Sequence[str], params: dict[str, str]) -> list[Parameter]:
    """docs: docstrings that may have their meanings. params: meanings and defaults of Spark ML."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    pairs = [*zip(plain, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    pairs = [(argument, value) for argument, value in pairs if argument.arg not in ("self", "cls")]
    names = [argument.arg for argument, _ in pairs if not argument.arg.startswith("_")]
    meanings = {name: text for doc in reversed(docs) for name, text in _meanings(doc, names).items()}
    return [
        Parameter(
            argument.arg,
            None
            if value is None
            else _ML_DEFAULTS.get(argument.arg, ast.unparse(value))
            if params
            else ast.unparse(value),
            meanings.get(argument.arg) or params.get(argument.arg),
        )
        for argument, value in pairs
        if not argument.arg.startswith("_")
    ]


_END_OF_MEANING = re.compile(r"\n\s*\n|\n\s*(?:Raises|Returns)\b|\n\s*[a-z_]\w*(?:, [a-z_]\w*)*:\s")


def _meanings(doc: str, names: Sequence[str]) -> dict[str, str]:
    """What a docstring says behind `name:` or `first, second:`, where these begin a line or a sentence."""
    if not names:
        return {}
    label = re.compile(r"(?:^\s*|(?<=[.;)] )|(?<=\.\n))\s*([a-z_]\w*(?:, [a-z_]\w*)*):\s", re.MULTILINE)
    labels = [one for one in label.finditer(doc) if set(names) & set(one[1].split(", "))]
    found = {}
    for first, following in zip(labels, [*labels[1:], None], strict=False):
        text = doc[first.end() : following.start() if following else len(doc)]
        text = _END_OF_MEANING.split(text)[0]  # an entry of another function's parameter begins a line as well
        for one in first[1].split(", "):
            if one in names:
                found[one] = " ".join(text.split()).rstrip(";")
    return found


def _params_of_ml(file: str, is_model: bool) -> dict[str, str]:
    """Meanings of the parameters of an estimator or a model, by the Params of Spark ML in its class and its bases."""
    found: dict[str, str] = {}
    for one in dict.fromkeys((file, *_ML)):
        for node in _module(one).body:
            if not isinstance(node, ast.ClassDef) or is_model != (node.name.endswith("Model") or "ModelP" in node.name):
                continue
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in ("_param", "Param"):
                    texts = [one.value for one in call.args if isinstance(one, ast.Constant)]
                    if len(texts) == 2:
                        found.setdefault(str(texts[0]), str(texts[1]))
    return found


def _defaults_of_ml() -> dict[str, str]:
    for node in _module("spark/common/params.py").body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "DEFAULTS":
            return {name: repr(value) for name, value in ast.literal_eval(node.value).items()}  # type: ignore[arg-type]
    raise LookupError("spark/common/params.py has no DEFAULTS.")


_ML_DEFAULTS = _defaults_of_ml()


def objects() -> Iterator[tuple[str, str, ast.ClassDef | ast.FunctionDef, dict[str, str]]]:
    """Section, module, object, and the meanings that Spark ML has of its parameters."""
    for heading, module, named in SECTIONS:
        for file, name in named:
            is_ml = file.endswith("/estimator.py")
            node = _find(file, name.removesuffix("()"))
            if name.endswith("()") and isinstance(node, ast.ClassDef):
                constructor = [one for one in _methods(node) if one.name == "__init__"]
                others = [one for one in node.body if not isinstance(one, ast.FunctionDef)]
                node = ast.ClassDef(node.name, node.bases, node.keywords, [*others, *constructor], node.decorator_list)
            yield heading, module, node, _params_of_ml(file, node.name.endswith("Model")) if is_ml else {}


def callables(node: ast.ClassDef | ast.FunctionDef, is_ml: bool) -> Iterator[tuple[str, ast.FunctionDef, list[str]]]:
    """Each with its title, and the docstrings that may describe its parameters."""
    if isinstance(node, ast.FunctionDef):
        yield node.name, node, [ast.get_docstring(node) or ""]
        return
    own = ast.get_docstring(node) or ""
    for method in _methods(node):
        doc = ast.get_docstring(method) or ""
        if method.name == "__init__":
            yield node.name, method, [own, doc]
        elif not method.name.startswith("_") and (not is_ml or method.name in _OF_ESTIMATORS):
            yield f"{node.name}.{method.name}", method, [doc, own]


def undescribed() -> list[str]:
    """Parameters whose meaning stands nowhere, as "module.name(parameter)"."""
    return [f"{name}({one.name})" for name, one in all_parameters() if not one.meaning]


def all_parameters() -> Iterator[tuple[str, Parameter]]:
    """With the full name of the function or class that takes each."""
    for _, module, node, params in objects():
        if isinstance(node, ast.ClassDef):
            yield from ((f"{module}.{node.name}", one) for one in fields(node))
        for title, function, docs in callables(node, bool(params)):
            yield from ((f"{module}.{title}", one) for one in parameters_of(function, docs, params))


def markdown() -> str:
    """The page."""
    blocks = [_BEGIN]
    latest = ""
    for heading, module, node, params in objects():
        if heading != latest:
            blocks.append(f"\n## {heading}\n\n`from {module} import {_names(heading)}`\n")
            latest = heading
        blocks.append(_object(node, params))
    return "".join(blocks)


def _names(heading: str) -> str:
    named = next(named for title, _, named in SECTIONS if title == heading)
    return ", ".join(name.removesuffix("()") for _, name in named)


def _object(node: ast.ClassDef | ast.FunctionDef, params: dict[str, str]) -> str:
    blocks = [f"\n### {node.name}\n"]
    found = list(callables(node, bool(params)))
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases if not ast.unparse(base).startswith("_"))
        blocks.append(f"\nA class{f', of {bases}' if bases else ''}.\n")
        found.sort(key=lambda one: one[1].name != "__init__")
        constructor = [one for title, function, docs in found[:1] for one in parameters_of(function, docs, params)]
        of_class = fields(node) or (constructor if found and found[0][1].name == "__init__" else [])
        blocks.append(_text(ast.get_docstring(node) or "", of_class) + _table(of_class))
    for title, function, docs in found:
        if function.name == "__init__":
            continue
        parameters = parameters_of(function, docs, params)
        is_property = any(isinstance(one, ast.Name) and one.id == "property" for one in function.decorator_list)
        shown = f"{'' if is_property else _signature(function)}{_result(function)}".strip()
        blocks.append(f"\n#### {title}\n" if isinstance(node, ast.ClassDef) else "")
        blocks.append(f"\n`{shown}`\n" + _text(docs[0], parameters) + _table(parameters))
    return "".join(blocks)


def fields(node: ast.ClassDef) -> list[Parameter]:
    """Of a dataclass."""
    if not any("dataclass" in ast.unparse(one) for one in node.decorator_list):
        return []
    found = {
        one.target.id: ast.unparse(one.value) if one.value else None
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and not one.target.id.startswith("_")
    }
    meanings = _meanings(ast.get_docstring(node) or "", list(found))
    return [Parameter(name, default, meanings.get(name)) for name, default in found.items()]


def _signature(function: ast.FunctionDef) -> str:
    arguments = [one.arg for one in (*function.args.posonlyargs, *function.args.args) if one.arg not in ("self", "cls")]
    stars = [f"*{function.args.vararg.arg}"] if function.args.vararg else []
    stars += [one.arg for one in function.args.kwonlyargs]
    stars += [f"**{function.args.kwarg.arg}"] if function.args.kwarg else []
    return f"{function.name}({', '.join(arguments + stars)})"


def _result(function: ast.FunctionDef) -> str:
    return f" -> {ast.unparse(function.returns)}" if function.returns else ""


def _text(doc: str, parameters: Sequence[Parameter] = ()) -> str:
    """A docstring as Markdown, without the meanings of parameters: these stand in a table below."""
    names = [one.name for one in parameters]
    blocks = []
    for block in re.split(r"\n\s*\n", doc.strip()):
        if block.startswith(("Args:", "Arguments of the ")) or _begins_with_a_meaning(block, names):
            continue
        if all(line.startswith("    ") for line in block.splitlines()):
            blocks.append(f"```text\n{textwrap.dedent(block)}\n```")
        else:
            parts = re.split(r"(`[^`]*`)", re.sub(r"\n\s+", "\n", block))
            blocks.append("".join(one if one.startswith("`") else one.replace("<", "&lt;") for one in parts))
    return "\n" + "\n\n".join(blocks) + "\n" if blocks and doc else ""


def _begins_with_a_meaning(block: str, names: Sequence[str]) -> bool:
    found = re.match(r"\s*([a-z_]\w*(?:, [a-z_]\w*)*):\s", block)
    return found is not None and bool(set(found[1].split(", ")) & set(names))


def _table(parameters: Sequence[Parameter]) -> str:
    if not parameters:
        return ""
    rows = []
    for one in parameters:
        default = "" if one.default is None else f"`{one.default}`"
        meaning = (one.meaning or "").replace("|", "\\|")
        rows.append(f"| `{one.name}` | {default} | {meaning} |\n")
    return "\n| parameter | default | meaning |\n|---|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    print(markdown(), end="")
