"""docs/tools/language.py, which `make lint` runs: it finds each habit, and nothing in a page without them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
language = runpy.run_path(str(ROOT / "docs/tools/language.py"))
findings = language["findings"]

HABITS = (
    "What is not there is refused.",
    "They get a part of what is left.",
    "Who starts a process by hand starts the job.",
    "A report goes to who asked for it.",
    "It admits whoever connects.",
    "It counts those that wait.",
    "It is that which counts.",
    "Where a rank is lost, the job ends.",
    "Set the size, where nothing tells it.",
    "You need make besides.",
    "The count begins anew.",
    "It waits for ever.",
    "The reason stands below.",
    "Downloads come on top.",
    "It computes as good as nothing.",
    "A command mends the files.",
    "A job takes in new hosts.",
    "The tools are at hand.",
    "It has a token of its own.",
    "A missing file says so.",
    "The job ends with a sentence.",
    "The log tells of a loss.",
    "The matrix runs in whole.",
    "It is nothing but a list.",
    "All run but for one.",
    "Another one comes in its place.",
    "The names are otherwise.",
    "The report has to do.",
    "Two variables do as well.",
    "Any port will do.",
    "The keeper ends.",
    "A rank leaves the world.",
    "Launchers the like of mpirun.",
    "<<<<<<< HEAD",
)

GOOD = """# What is not protected

Some text: `where it is` and `anew` are code. What happens next is a question.

```sh
who is there   # besides
```

<!-- made by `this` -->
Where all is anew, it goes on.
<!-- until here -->
- The log says where each file is, and what the job waits for. Who is it? Where is it?
- See [the page](anew.md#besides).
"""


@pytest.mark.parametrize("sentence", HABITS)
def test_a_habit_is_found_on_its_line(sentence: str) -> None:
    lines = [line for line, _, _ in findings(f"# A page\n\nGood.\n\n{sentence}\n")]
    assert set(lines) == {5}


def test_each_rule_has_an_example() -> None:
    hints = [hint for sentence in HABITS for _, _, hint in findings(f"# A page\n\n{sentence}\n")]
    assert {hint for _, hint in language["RULES"]} == set(hints)


def test_code_headings_links_and_questions_are_not_read() -> None:
    assert list(findings(GOOD)) == []


def test_of_a_decision_only_the_first_part_is_read() -> None:
    page = "# 1: A\n\n**Decision.** It is\nanew.\n\n**Why.** Besides, it waits for ever.\n"
    assert [line for line, _, _ in findings(page, True)] == [4]


def test_a_page_of_habits_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    name = "tests/packaging/test_language.py"
    assert language["main"]([str(ROOT / name)]) == 1
    assert all(line.startswith(f"{name}:") for line in capsys.readouterr().out.splitlines())


def test_of_python_messages_are_read() -> None:
    source = '''"""It waits for ever, besides."""
name = "besides"  # a message of more than four words, anew
raise ValueError(f"{name} is not there, "
    "and it begins anew.")
'''
    assert [(line, words) for line, words, _ in language["of_python"](source)] == [(3, "anew")]


def test_of_python_docstrings_of_public_names_are_read() -> None:
    source = '''"""This module waits for ever, besides."""
def run():
    """Runs the function.

    It is run anew."""
class State:
    """One has a value of its own."""
    def save(self):
        """It is saved by whoever comes."""
    def _save(self):
        """Where no rank has it, it is saved anew."""
def helper():
    """It waits for ever for ranks."""
'''
    found = [(line, words) for line, words, _ in language["of_python"](source, frozenset({"run", "State"}))]
    assert found == [(5, "anew"), (7, "of its own"), (9, "by whoever comes"), (9, "whoever")]


def test_public_names_are_those_of_the_packages() -> None:
    assert language["public_names"]() >= {"allreduce", "DistributedOptimizer", "RayExecutor", "TorchEstimator"}
