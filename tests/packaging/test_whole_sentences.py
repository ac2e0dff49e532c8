"""Whole sentences of errors, with their codes, are asserted in the `test_*_sentences.py` alone (ADR 75).

So a sentence is reworded in the product and in one file. What this test can tell for certain is a text that ends with a
code; parts of sentences are for reviewers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from horovod.base import errors

TESTS = Path(__file__).parents[1]
CODES = {str(code) for kind in vars(errors).values() if isinstance(kind, type(errors.ErrorCode)) for code in kind}
ENDS_WITH_A_CODE = re.compile(r"[.?!]\s\\?\[([a-z0-9-]+)\\?\]\$?\s*\Z")

EXCEPTIONS = {
    "runner/test_run_checker.py": "sentences that the test has made up",
    "runtime/test_error_codes.py": "how a code is put behind a sentence; the sentences are made up",
    "runtime/test_common.py": "programs of earlier versions look for this text",
    "runtime/test_init.py": "programs of earlier versions look for this text",
    "torch/test_torch_process_sets.py": "programs of earlier versions look for this text",
}


def asserted(tree: ast.AST) -> Iterator[str]:
    """The texts in assertions, and those that `pytest.raises(match=...)` looks for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.keyword) and node.arg == "match"):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def whole_sentences(source: str) -> list[str]:
    found = ((text, ENDS_WITH_A_CODE.search(text)) for text in asserted(ast.parse(source)))
    return [text for text, end in found if end is not None and end[1] in CODES]


def test_a_whole_sentence_is_found() -> None:
    source = 'assert said == "No host. [unknown-host]"\nraises(E, match=r"^No host\\. \\[unknown-host\\]$")'
    assert len(whole_sentences(source)) == 2
    assert whole_sentences('assert code == "unknown-host" or said == "see [1]. [no-such-code]"') == []


def test_no_other_file_asserts_whole_sentences() -> None:
    files = (file for file in TESTS.rglob("*.py") if not file.name.endswith("_sentences.py"))
    found = {str(file.relative_to(TESTS)): whole_sentences(file.read_text()) for file in files}
    assert {name for name, sentences in found.items() if sentences} == set(EXCEPTIONS), "use ends_with(code, facts)"
