"""The codes of errors: how a sentence carries one, and that the page and the engine have the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from error_codes import ends_with
from errors_page import markdown

from horovod.base.errors import (
    FAMILIES,
    LaunchCode,
    OperationCode,
    WorldCode,
    code_of,
    coded,
    coded_like,
    without_code,
)
from horovod.base.words import printable
from horovod.common.exceptions import HorovodInternalError

ROOT = Path(__file__).parents[2]


def test_a_sentence_carries_its_code() -> None:
    text = coded(LaunchCode.UNKNOWN_HOST, "There is no host named 'b'.")
    assert text == "There is no host named 'b'. [unknown-host]"
    assert code_of(ValueError(text)) is LaunchCode.UNKNOWN_HOST
    assert code_of(f"horovodrun: {text}\n") is LaunchCode.UNKNOWN_HOST
    assert without_code(text) == "There is no host named 'b'."
    assert HorovodInternalError(coded(OperationCode.PEER_LOST, "Rank 1 was lost.")).code is OperationCode.PEER_LOST


def test_a_sentence_around_another_one_has_one_code() -> None:
    inner = coded(LaunchCode.UNKNOWN_HOST, "There is no host named 'b'.")
    outer = coded(WorldCode.JOB_RUNS_ALREADY, f"Rank 1 was refused: {inner}")
    assert outer == "Rank 1 was refused: There is no host named 'b'. [job-runs-already]"


def test_another_sentence_about_the_same_fault_keeps_its_code() -> None:
    inner = coded(LaunchCode.UNKNOWN_HOST, "There is no host named 'b'.")
    assert coded_like(inner, "The job waits for host 'b'.") == "The job waits for host 'b'. [unknown-host]"
    assert coded_like("It rains.", "The job waits.") == "The job waits."
    assert printable(inner, 8) == "There is... [unknown-host]"


@pytest.mark.parametrize("behind", [" [Op:HorovodAllreduce] name: x", "\n\t [[{{node x}}]]\n\nOriginal stack trace"])
def test_a_text_in_which_tensorflow_names_its_node(behind: str) -> None:
    text = coded(OperationCode.PEER_LOST, "Rank 1 was lost.") + behind
    assert code_of(text) is OperationCode.PEER_LOST
    assert without_code(text) == "Rank 1 was lost." + behind
    assert re.search(ends_with(OperationCode.PEER_LOST, "Rank 1"), text)
    assert not re.search(ends_with(OperationCode.SHUT_DOWN), text)


@pytest.mark.parametrize(
    "text", ["", "Rank 1 was lost.", "in [unknown-host] or not", "the value [no-such-code]", "x[deadlock]"]
)
def test_a_text_without_a_code(text: str) -> None:
    assert code_of(text) is None
    assert without_code(text) == text


def test_a_pattern_of_code_and_facts() -> None:
    text = coded(OperationCode.MISMATCHED, "allreduce.x: rank 0 has (2,), rank 1 has (3,).")
    assert re.search(ends_with(OperationCode.MISMATCHED, "rank 1", "allreduce.x"), text)
    assert not re.search(ends_with(OperationCode.MISMATCHED, "rank 2"), text)
    assert not re.search(ends_with(OperationCode.DEADLOCK), text)


def test_the_engine_has_no_other_words() -> None:
    header = (ROOT / "csrc" / "base" / "error_code.h").read_text()
    words = re.findall(r'inline constexpr ErrorCode (\w+)\{"([^"]+)"\};', header)
    assert words
    assert [word for name, word in words if name.replace("_", "-") != word] == []
    assert {word for _, word in words} <= {str(code) for family in FAMILIES for code in family}


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    assert page == markdown(), "python docs/tools/errors_page.py > docs/errors.md"
