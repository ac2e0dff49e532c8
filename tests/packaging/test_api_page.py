"""docs/api-clusters.md: it is made of the sources of today, leaves no public name out, and describes each parameter."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import api_page
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "api-clusters.md"
NOT_SHOWN = {"BaseHorovodWorker", "AbstractFilesystemStore", "RemoteStore"}  # no user makes one


def test_the_page_is_that_of_today() -> None:
    assert PAGE.read_text() == api_page.markdown(), "python docs/tools/api_page.py > docs/api-clusters.md"


def test_each_parameter_has_a_meaning() -> None:
    assert api_page.undescribed() == [], "write `name: meaning` into the docstring"
    counted = Counter(name for name, _ in api_page.all_parameters())
    assert counted["horovod.spark.torch.TorchEstimator"] == 44
    assert counted.total() > 300


def test_a_parameter_without_a_meaning_is_told() -> None:
    source = '''
def run(one, two=2, *, three):
    """Runs.

    one: the first; in two lines, of
        which this is one. three: the last.

    Raises ValueError: never.
    """
'''
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    found = api_page.parameters_of(function, [ast.get_docstring(function) or ""], {})
    assert [(one.name, one.default, one.meaning) for one in found] == [
        ("one", None, "the first; in two lines, of which this is one."),
        ("two", "2", None),
        ("three", None, "the last."),
    ]


@pytest.mark.parametrize(
    "package", ["ray", "spark", "spark/torch", "spark/keras", "spark/lightning", "spark/common/store"]
)
def test_every_public_name_is_shown(package: str) -> None:
    tree = ast.parse((api_page.CLIENTS / package / "__init__.py").read_text())
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    module = f"horovod.{package.replace('/', '.')}"
    shown = {name.removesuffix("()") for _, where, named in api_page.SECTIONS if where == module for _, name in named}
    assert set(names) - NOT_SHOWN - shown == set()
