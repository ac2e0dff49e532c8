"""Public collectives of all frameworks are what tables say: their arguments, defaults, and what help() shows of them.

Sources are read and not imported, so that every framework is tested where none is installed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from horovod.common.ops import faces

CLIENTS: Final = Path(__file__).resolve().parents[2] / "clients"
NAMES: Final = {"torch": faces.TORCH, "tensorflow": faces.TENSORFLOW, "jax": faces.JAX, "mxnet": faces.MXNET} | {
    "keras": faces.KERAS
}

REQUIRED: Final = object()
# The default of each argument; of one operation, where it is another there.
DEFAULTS: Final[dict[str, object]] = {
    **dict.fromkeys(("tensor", "tensors", "value", "variables", "root_rank"), REQUIRED),
    **dict.fromkeys(("average", "name", "op", "splits"), "None"),
    **dict.fromkeys(("prescale_factor", "postscale_factor"), "1.0"),
    **dict.fromkeys(("device_dense", "device_sparse"), "''"),
    "compression": "Compression.none",
    "process_set": "global_process_set",
    "ignore_name_scope": "False",
    "priority": "0",
    "device": "-1",
    "reducescatter.op": "Average",
    "sparse_allreduce.op": REQUIRED,
    "sparse_allreduce.name": REQUIRED,
    "keras.compression": "None",  # the backend is not known when the module is imported
}

_FACTORS: Final = "prescale_factor postscale_factor"
# The arguments of each operation in their order, which scripts rely on where they give them by position. Those of a
# grouped form, of an asynchronous one and of one in place follow, but for `compression`, which only the others have.
ORDERS: Final[dict[str, dict[str, str]]] = {
    "torch": {
        "allreduce": f"tensor average name compression op {_FACTORS} process_set",
        "allgather": "tensor name process_set",
        "broadcast": "tensor root_rank name process_set",
        "alltoall": "tensor splits name process_set",
        "reducescatter": f"tensor name compression op process_set {_FACTORS}",
        "sparse_allreduce_async": "tensor name op process_set",
        "barrier": "process_set",
        "join": "device",
    },
    "tensorflow": {
        "allreduce": f"tensor average device_dense device_sparse compression op {_FACTORS} name process_set "
        "ignore_name_scope",
        "grouped_allreduce": f"tensors average device_dense device_sparse compression op {_FACTORS} process_set "
        "ignore_name_scope name",
        "allgather": "tensor name ignore_name_scope process_set",
        "broadcast": "tensor root_rank name ignore_name_scope process_set",
        "broadcast_": "variables root_rank name process_set",
        "alltoall": "tensor splits name ignore_name_scope process_set",
        "reducescatter": f"tensor device_dense compression op name process_set ignore_name_scope {_FACTORS}",
        "grouped_reducescatter": f"tensors device_dense compression op process_set {_FACTORS} name",
        "barrier": "process_set",
        "join": "",
    },
    "mxnet": {
        "allreduce": f"tensor average name priority {_FACTORS} process_set op compression",
        "allgather": "tensor name priority process_set",
        "broadcast": "tensor root_rank name priority process_set",
        "alltoall": "tensor splits name priority process_set",
        "reducescatter": f"tensor op name priority process_set {_FACTORS} compression",
        "sparse_allreduce_async": "tensor name op process_set",
        "barrier": "process_set",
        "join": "device",
    },
    "keras": {
        "allreduce": f"value name average {_FACTORS} op compression",
        "allgather": "value name",
        "broadcast": "value root_rank name",
        "reducescatter": "value name op",
        "barrier": "process_set",
    },
}
ORDERS["jax"] = {name: order for name, order in ORDERS["torch"].items() if name != "sparse_allreduce_async"}


class Face(NamedTuple):
    framework: str
    name: str
    arguments: dict[str, object]  # in their order, with their defaults
    docstring: str

    def __str__(self) -> str:
        return f"{self.framework}.{self.name}"


def _sources(module: str) -> Iterator[Path]:
    path = CLIENTS / module.replace(".", "/")
    yield from path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]


def _faces() -> Iterator[Face]:
    for framework, words in NAMES.items():
        for source in (one for module in words.modules for one in _sources(module)):
            for node in ast.parse(source.read_text()).body:
                if isinstance(node, ast.FunctionDef) and faces.operation_of(node.name):
                    given = [*node.args.args, *node.args.kwonlyargs]
                    defaults = [*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)]
                    values = [REQUIRED] * (len(given) - len(defaults)) + [ast.unparse(one) for one in defaults]
                    arguments = dict(zip((one.arg for one in given), values, strict=True))
                    yield Face(framework, node.name, arguments, ast.get_docstring(node) or "")


FACES: Final = sorted(_faces(), key=str)


def test_all_are_found() -> None:
    assert {one.framework for one in FACES} == set(NAMES)
    for framework, operations in ORDERS.items():
        found = {one.name for one in FACES if one.framework == framework}
        assert {faces.operation_of(name) for name in found} == {faces.operation_of(name) for name in operations}


@pytest.mark.parametrize("face", FACES, ids=str)
def test_arguments_are_in_the_order_of_the_table(face: Face) -> None:
    orders, operation = ORDERS[face.framework], faces.operation_of(face.name)
    order = (orders[face.name] if face.name in orders else orders[operation]).split()
    if face.name.startswith("grouped_"):
        order = ["tensors" if one == "tensor" else one for one in order]
    if "_async" in face.name or face.name.endswith("_"):
        order = [one for one in order if one != "compression"]
    assert list(face.arguments) == order


@pytest.mark.parametrize("face", FACES, ids=str)
def test_defaults_are_those_of_the_table(face: Face) -> None:
    operation = faces.operation_of(face.name)
    for argument, default in face.arguments.items():
        keys = (f"{face.framework}.{argument}", f"{operation}.{argument}", argument)
        assert default == DEFAULTS[next(key for key in keys if key in DEFAULTS)], argument


@pytest.mark.parametrize("face", FACES, ids=str)
def test_its_help_is_whole(face: Face) -> None:
    """help() shows a summary, an example, each argument, the result and the errors of the operation."""
    assert not re.search("^(Args|Raises):", face.docstring, re.MULTILINE), "the table says it (common/ops/faces.py)"
    words = NAMES[face.framework]
    text = faces.whole(words, face.name, face.arguments, face.docstring)
    assert text.startswith(face.docstring.partition("\n")[0])
    described = re.findall(r"^    (\w+): (?=\S)", text.partition("Args:\n")[2].partition("\n\n")[0], re.MULTILINE)
    assert described == list(face.arguments)
    assert ">>> " in face.docstring
    assert re.search(r"^Returns:\n    \w*`?\w", text, re.MULTILINE)
    assert "aise" in text
    assert not re.search(r"[{}]", text.removeprefix(face.docstring.partition("\n\nReturns:")[0]))
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("words", NAMES.values(), ids=NAMES)
def test_no_entry_is_of_no_use(words: faces.Words) -> None:
    names = [one.name for one in FACES if NAMES[one.framework] is words]
    arguments = {argument for one in FACES if NAMES[one.framework] is words for argument in one.arguments}
    operations = {faces.operation_of(name) for name in names}
    for key in {**words.instead, **words.more}:
        function, _, argument = key.rpartition(".")
        assert argument in {*arguments, "returns"}, key
        assert not function or function in {*names, *operations}, key
    for error in words.errors:
        assert any(faces.reasons_of(words, name, error) for name in names), error


def test_no_argument_and_no_reason_is_of_no_use() -> None:
    used = {argument for one in FACES for argument in one.arguments}
    assert {key.rpartition(".")[2] for key in faces.ARGUMENTS} <= used
    operations = {faces.operation_of(one.name) for one in FACES}
    assert {*faces.RESULTS, *faces.WHOLE_RESULTS} == operations
    listed = {reason for words in NAMES.values() for reasons in words.errors.values() for reason in reasons.split(", ")}
    assert {reason for reason, _, _ in faces.REASONS} == listed
