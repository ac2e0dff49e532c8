"""docs/errors.md, made from the codes: `python docs/tools/errors_page.py > docs/errors.md`."""

from __future__ import annotations

import inspect

from horovod.base.errors import FAMILIES

_BEGIN = """# Error codes

This page is made from `base/errors` by `python docs/tools/errors_page.py > docs/errors.md`.

The message of an error says what was wrong, where, and what to do. It ends with a code in square brackets:
`... [mismatched-operations]`. A release may change the words of a message, but not its code. A program gets the code
from `horovod.base.errors.code_of(error)`, also for an error that came through TensorFlow. In the output of another
process the code is the last word of the line. A Python exception that Horovod only passes on has no code.
"""


def markdown() -> str:
    """The page."""
    lines = [_BEGIN]
    for family in FAMILIES:
        about = inspect.cleandoc(family.__doc__ or "")
        lines += [f"## {family.__name__.removesuffix('Code')}", "", about, "", "| code | meaning |", "|---|---|"]
        lines += [f"| `{code}` | {code.meaning} |" for code in sorted(family)]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(), end="")
