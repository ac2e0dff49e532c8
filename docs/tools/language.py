"""Finds habits of language that make pages hard to read: `python docs/tools/language.py [FILE ...]`.

`make lint` runs it over `PAGES`. A finding is a line `file:line: "words": hint`. Of a page the script reads no code,
comments, headings or targets of links, of a page in docs/adr only the decision, and of Python only messages and help
texts: the strings of more than four words.

Two tools were weighed. The package `vale` on PyPI downloads its program when it first runs, so `make lint` would need
GitHub. `proselint` has checks of its own and no way to add ours.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "deploy/*.md",
    "benchmarks/*.md",
    "docs/adr/*.md",
    "base/**/*.py",
)

# Right uses of words that a rule finds. A finding is dropped if it begins with one of these patterns.
ALLOWED = (r"what (?:to|happens|this|follows)\b",)

# Where a clause can begin: after a full stop, a colon, a bar of a table, the sign of a list item or an empty line.
_START = r"(?:(?<=[.:;!|(]\s)|(?<=[.:;!]\s\s)|(?<=\n\n)|(?<=\n[*-]\s)|(?<=\*\*)|(?<=\())"
_IS = r"(?:is|are|was|were|has|have|had|can|does|do|did|may|must|will|would|it|they|you|he|a|an|the|there|this)\b"

# A pattern without regard to case, in which a space stands for any white space, and a hint.
RULES = (
    (_START + r"what(?:ever)? [^.?]*?(?:[.;:|!]|\n\n)", "`what` is no subject: name the thing"),
    (rf"\b(?:of|from|with|by|than|in|for|on|without|into|as|to) what {_IS}", "name the thing instead of `what`"),
    (
        _START + r"who(?:ever)? (?!(?:is|are) (?:it|this)\b)[^.?]*?(?:[.;:|!]|\n\n)",
        "`who` is no subject: name the person or the program",
    ),
    (
        r"(?:\b(?:of|from|with|by|than|in|for|to|and|but|on)|;) who(?:ever)? \w+(?:s|ed|d)\b",
        "name the person or the program instead of `who`",
    ),
    (r"\bwhoever\b", "name the person or the program"),
    (r"\b(?:those|he) (?:that|who|whose|which)\b", "name the things or people: `the ranks that`"),
    (r"\bthat which\b", "name the thing"),
    (_START + r"where (?!(?:to|is|are|does|do|was)\b)[^.?;:|]*?[,.]", "`if` or `when`: `where` is for a place"),
    (
        r"(?<![\w`])where (?:no|none|nothing|nobody|neither|not|all|one|some|it|they|you|both|that|this|there)\b",
        "`if` or `when`: `where` is for a place",
    ),
    (r"\bbesides\b", "`also`, or name the two things"),
    (r"(?<!-)\banew\b", "`again`"),
    (r"\bfor ever\b", "`forever`, `without end`"),
    (r"\b(?:stands?|stood) (?:below|above|behind|beside)\b", "link to it, or say which row, word or file it is"),
    (r"\b(?:comes?|came|come) on top\b", "`plus`, `in addition`"),
    (r"\bas good as (?:nothing|none|no)\b", "`almost nothing`"),
    (r"\bmend(?:s|ed|ing)?\b", "`fix`, `repair`"),
    (r"\b(?:takes?|taking|taken|took) in\b", "`accept`, `admit`, `read`"),
    (r"\bat hand\b", "`available`"),
    (r"\bof (?:its|their|one's|your|our) own(?=[^\w\s]| (?:and|or|for|that|in|on|to)\b)", "`its own` before the noun"),
    (r"\b(?:says?|said|saying) so\b", "say which error, warning or line it is"),
    (r"\b(?:in|with|by) (?:a|one) sentence\b", "`an error`, `a message`"),
    (r"\b(?:tells?|told) of\b", "`report`"),
    (r"\bin whole\b(?! number)", "`whole`, `completely`"),
    (r"\bnothing (?:else )?but\b", "`only`"),
    (r"\bbut for\b", "`except`"),
    (r"\bin (?:its|their) place\b", "`instead`"),
    (r"\b(?:is|are|was|were) otherwise\b", "`differs`, and say how"),
    (r"\b(?:has|have) to do\b", "say what it must do"),
    (r"\b(?:do|does|did) as well\b", "`is enough`, `also works`"),
    (r"\bwill do\b", "`is enough`, `works`"),
    (r"\bkeepers?\b", "`shim`, the field's word"),
    (r"\bleav(?:es?|ing) the world\b", "say how the process ends"),
    (r"\bthe likes? of\b", "`such as`"),
    (r"(?<=\n)(?:<{7}|>{7}) ", "a mark of a merge: choose one of the two versions"),
)  # fmt: skip

_COMPILED = [(re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), hint) for pattern, hint in RULES]
_ALLOWED = re.compile("|".join(ALLOWED).replace(" ", r"\s+"), re.IGNORECASE)
# Fenced blocks, generated parts, comments, inline code, targets of links and headings.
_NO_PROSE = re.compile(
    r"^ *```.*?^ *```$|<!-- made by.*?<!-- until here -->|<!--.*?-->|`+[^`]+`+|(?<=\])\([^)\s]*\)|^#+ .*?$|https?://\S+",
    re.DOTALL | re.MULTILINE,
)
_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_STRINGS = re.compile(r'(?:f?"(?:[^"\\\n]|\\.)*"\s*)+')
_DOCSTRINGS = re.compile(r'""".*?"""|^ *#.*?$', re.DOTALL | re.MULTILINE)
_DECISION = re.compile(r"^\*\*Decision\.?\*\*.*?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)


def _blank(match: re.Match[str]) -> str:
    """The text as `x` and line ends, so that lines keep their numbers; a span of code stays a word of its sentence."""
    text = match[0]
    filler = "x" if text.startswith("`") and "\n" not in text else " "
    return re.sub(r"[^\n]", filler, text)


def findings(text: str, is_decision: bool = False) -> Iterator[tuple[int, str, str]]:
    """The line, the words and the hint of each habit in a page of Markdown."""
    prose = _NO_PROSE.sub(_blank, text)
    if is_decision:
        decision = _DECISION.search(prose)
        begin, end = decision.span() if decision else (0, 0)
        prose = re.sub(r"[^\n]", " ", prose[:begin]) + prose[begin:end]
    found = []
    for pattern, hint in _COMPILED:
        for match in pattern.finditer(prose):
            if not _ALLOWED.match(match[0]):
                words = " ".join(text[match.start() : match.end()].split())
                found.append((prose.count("\n", 0, match.start()) + 1, words[:70], hint))
    yield from sorted(found)


def of_python(source: str) -> Iterator[tuple[int, str, str]]:
    """The same for the messages of a Python file."""
    for group in _STRINGS.finditer(_DOCSTRINGS.sub(_blank, source)):
        if group[0].count(" ") > 4:
            begin = source.count("\n", 0, group.start())
            message = "".join(_STRING.findall(group[0]))
            yield from ((begin + 1, words, hint) for _, words, hint in findings(f"\n\n{message}\n\n"))


def main(arguments: list[str]) -> int:
    """1 if there is a finding."""
    asked = [Path(one).resolve() for one in arguments]
    files = asked or [path for page in PAGES for path in sorted(ROOT.glob(page))]
    count = 0
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        for line, words, hint in of_python(text) if path.suffix == ".py" else findings(text, "/adr/" in name):
            print(f'{name}:{line}: "{words}": {hint}')
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
