"""docs/errors.md, made from the codes: `python docs/tools/errors_page.py > docs/errors.md`."""

from __future__ import annotations

import inspect

from horovod.base.errors import FAMILIES

_BEGIN = """# Error codes

This page is made from `base/errors` by `python docs/tools/errors_page.py > docs/errors.md`.

The sentence of an error says what was wrong, where, and what to do. Behind it stands its code, in square brackets:
`... [mismatched-operations]`. Sentences may be worded better in any release; codes stay. A program reads the code with
`horovod.base.errors.code_of(error)`, and in output of other processes it is the last word of the line. It also works on
an error that came through TensorFlow. An exception of Python that Horovod only passes on has no code.
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
