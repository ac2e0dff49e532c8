"""Finds habits of language that make pages hard to read: `python docs/tools/language.py [FILE ...]`.

`make lint` runs it over `PAGES`. A finding is a line `file:line: "words": hint`. Of a page the script reads no code,
comments, headings or targets of links, and of a page in docs/adr only the decision. Of a Python file it reads strings
of more than four words that are no docstrings (messages and help texts). Of the clients it also reads the docstrings of
functions and classes whose name is in an `__all__`, and of their public methods.

Two tools were weighed. The package `vale` on PyPI downloads its program when it first runs, so `make lint` would need
GitHub. `proselint` has checks of its own and no way to add ours.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
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
    "clients/**/*.py",
    "coordinator/**/*.py",
    "worker/**/*.py",
)

# Pages that docs/tools/frameworks_api_page.py makes of docstrings.
FROM_DOCSTRINGS = {f"api-{name}" for name in ("torch", "tensorflow", "keras", "jax", "mxnet", "shared")}

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


@cache
def public_names() -> frozenset[str]:
    """All names in an `__all__` of the clients."""
    names = set()
    for path in (ROOT / "clients").rglob("*.py"):
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
                names |= {one.value for one in ast.walk(statement.value) if isinstance(one, ast.Constant)}
    return frozenset(names)


def _public_docstrings(body: Sequence[ast.stmt], names: frozenset[str] | None) -> Iterator[ast.expr]:
    """Those of the functions and classes in `body` that have one of `names`, or no underscore if that is None."""
    for one in body:
        if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if one.name in names if names is not None else not one.name.startswith("_"):
            if ast.get_docstring(one) and isinstance(one.body[0], ast.Expr):
                yield one.body[0].value
            if isinstance(one, ast.ClassDef):
                yield from _public_docstrings(one.body, None)


def of_python(source: str, names: frozenset[str] = frozenset()) -> Iterator[tuple[int, str, str]]:
    """The same for the messages of a Python file, and for its docstrings of functions and classes with these names."""
    tree = ast.parse(source)
    public = set(_public_docstrings(tree.body, names))
    unread: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and node.value not in public:
            unread.add(node.value)
        if isinstance(node, ast.JoinedStr):
            unread.update(part for value in node.values for part in ast.walk(value))
    for node in ast.walk(tree):
        if node in unread or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)
        if text.count(" ") > 4:
            found = findings(f"\n\n{inspect.cleandoc(text)}\n\n")
            yield from ((node.lineno + line - 3 if node in public else node.lineno, *rest) for line, *rest in found)


def main(arguments: list[str]) -> int:
    """1 if there is a finding."""
    asked = [Path(one).resolve() for one in arguments]
    files = asked or [path for page in PAGES for path in sorted(ROOT.glob(page)) if path.stem not in FROM_DOCSTRINGS]
    count = 0
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        for line, words, hint in (
            of_python(text, public_names() if name.startswith("clients/") else frozenset())
            if path.suffix == ".py"
            else findings(text, "/adr/" in name)
        ):
            print(f'{name}:{line}: "{words}": {hint}')
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
