"""docs/api-torch.md and the pages of other frameworks: of today's sources, and each public name with all that it needs.

What a name needs: a summary, each argument by its name, a result, what it raises, and an example.
"""

from __future__ import annotations

import ast
import re

import frameworks_api_page as page
import pytest
from public_names import ROOT

ENTRIES = [
    one for _, modules in page.PAGES.values() for module in modules for one in page.entries(module) if one.found.node
]
FUNCTIONS = [one for one in ENTRIES if isinstance(one.found.node, ast.FunctionDef)]
WITHOUT_EXAMPLE = {"horovod.keras.broadcast_global_variables"}  # always raises
NEVER_RAISE = {"gloo_enabled", "is_initialized", "mpi_enabled"}  # and *_built
# Functions that refer to another one for arguments and errors, in these words.
AS_ANOTHER = re.compile(r"(Takes|As|Arguments)\b[^.]*\b(raises?|same|does|horovod)\b", re.DOTALL)


def _name(entry: page.Entry) -> str:
    return f"{entry.module}.{entry.name}"


@pytest.mark.parametrize("name", page.PAGES)
def test_the_page_is_that_of_today(name: str) -> None:
    made = (ROOT / "docs" / f"{name}.md").read_text()
    assert made == page.markdown(name), "python docs/tools/frameworks_api_page.py"


@pytest.mark.parametrize("entry", ENTRIES, ids=_name)
def test_it_has_a_summary_and_an_example(entry: page.Entry) -> None:
    assert entry.doc
    assert ">>> " in entry.doc or _name(entry) in WITHOUT_EXAMPLE


@pytest.mark.parametrize("entry", FUNCTIONS, ids=_name)
def test_a_function_tells_arguments_result_and_errors(entry: page.Entry) -> None:
    function = entry.found.node
    assert isinstance(function, ast.FunctionDef)
    assert function.returns is not None
    assert "aise" in entry.doc or entry.name in NEVER_RAISE or entry.name.endswith("_built")
    names = [one.arg for one in page.arguments(function)]
    untold = [name for name in names if not re.search(rf"\b{name}\b", entry.doc)]
    assert not untold or AS_ANOTHER.search(entry.doc), untold


def test_all_names_are_counted() -> None:
    assert len(ENTRIES) > 180
    assert len(FUNCTIONS) > 140
