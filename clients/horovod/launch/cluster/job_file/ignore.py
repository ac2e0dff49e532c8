"""What .horovodignore names, by the rules of gitignore(5); tests compare it with `git check-ignore`.

One file, at the top of the code. Small enough to be our own: the launcher is installed on every host
(docs/adr/0054-job-files.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

IGNORE_FILE = ".horovodignore"
ALWAYS = (".git/", "__pycache__/")  # ignored unless the file says otherwise


@dataclass(frozen=True)
class _Rule:
    pattern: re.Pattern[str]
    negated: bool
    folders_only: bool


class Ignored:
    """`has(name, is_folder)`; what is below a folder that it has is not asked for."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._rules = [rule for line in (*ALWAYS, *lines) if (rule := _rule(line)) is not None]

    @classmethod
    def of(cls, folder: Path) -> Ignored:
        """The rules of the file in `folder`, if there is one. OSError when it can't be read."""
        path = folder / IGNORE_FILE
        return cls(path.read_text(encoding="utf-8", errors="surrogateescape").split("\n") if path.exists() else ())

    def has(self, name: str, is_folder: bool) -> bool:
        """Whether the last pattern that fits says so. name: with slashes, from the top."""
        for rule in reversed(self._rules):
            if (is_folder or not rule.folders_only) and rule.pattern.fullmatch(name):
                return not rule.negated
        return False


def _rule(line: str) -> _Rule | None:
    line = line.removesuffix("\r")
    while line.endswith(" ") and not line.endswith("\\ "):
        line = line[:-1]
    if not line or line.startswith("#"):
        return None
    negated = line.startswith("!")
    line = line[1:] if negated else line
    folders_only = line.endswith("/")
    line = line[:-1] if folders_only else line
    if not line:
        return None
    anchored = "/" in line
    translated = _translated(line.removeprefix("/"))
    if translated is None:
        return None
    try:
        pattern = re.compile(translated if anchored else f"(?:.*/)?{translated}", re.DOTALL)
    except re.error:  # a range that runs backwards: git matches nothing with it
        return None
    return _Rule(pattern, negated, folders_only)


_ONE = "[^/]"


def _translated(pattern: str) -> str | None:
    """The pattern as a regular expression; None if it fits nothing."""
    found, at = "", 0
    while at < len(pattern):
        rest = pattern[at:]
        at_start = at == 0 or pattern[at - 1] == "/"
        if at_start and rest.startswith("**/"):
            found, at = f"{found}(?:.*/)?", at + 3
        elif at_start and rest == "**":
            found, at = f"{found}.+" if at else f"{found}{_ONE}*", at + 2
        elif rest[0] == "*":
            found, at = f"{found}{_ONE}*", at + len(rest) - len(rest.lstrip("*"))
        elif rest[0] == "?":
            found, at = found + _ONE, at + 1
        elif rest[0] == "[":
            if (of_set := _set(rest)) is None:
                return None
            found, at = found + of_set[0], at + of_set[1]
        elif rest[0] == "\\":
            if len(rest) == 1:
                return None
            found, at = found + re.escape(rest[1]), at + 2
        else:
            found, at = found + re.escape(rest[0]), at + 1
    return found


_CLASSES = {
    "alnum": "a-zA-Z0-9", "alpha": "a-zA-Z", "blank": " \\t", "digit": "0-9", "lower": "a-z", "upper": "A-Z",
    "space": "\\s", "xdigit": "0-9a-fA-F", "punct": "!-/:-@\\[-`{-~",
}  # fmt: skip


def _set(text: str) -> tuple[str, int] | None:
    """`[a-c]` at the beginning of `text`: its expression and its length; None when it has no end."""
    at = 1
    negated = text[at : at + 1] in ("!", "^")
    at += negated
    inner, first = "", True
    while at < len(text) and (text[at] != "]" or first):
        first = False
        if (named := re.match(r"\[:([a-z]+):\]", text[at:])) and named[1] in _CLASSES:
            inner, at = inner + _CLASSES[named[1]], at + named.end()
        elif text[at] == "\\" and at + 1 < len(text):
            inner, at = inner + re.escape(text[at + 1]), at + 2
        else:
            inner, at = inner + (text[at] if text[at] == "-" else re.escape(text[at])), at + 1
    if at >= len(text):
        return None
    return f"(?!/)[{'^' if negated else ''}{inner}]", at + 1
