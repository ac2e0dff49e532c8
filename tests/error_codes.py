"""What tests of behaviour say of an error: its code. The wording is pinned by one file of each family alone."""

from __future__ import annotations

import re

from horovod.base.errors import ErrorCode


def ends_with(code: ErrorCode, *facts: object) -> str:
    """A pattern for `pytest.raises(match=...)`: a text that ends with the code and holds these facts (a name, a rank, a
    value), in any order. The facts are plain text; their first letter may be in either case, as a sentence may begin
    with one. Behind the code TensorFlow may name its node.
    """
    held = "".join(rf"(?=[\s\S]*{_in_either_case(str(fact))})" for fact in facts)
    return rf"\A{held}[\s\S]*\s\[{re.escape(code)}\](?:\s*\Z|\]?\s+\[Op:|\]?\s+\[\[\{{\{{node )"


def _in_either_case(fact: str) -> str:
    return f"(?i:{re.escape(fact[:1])}){re.escape(fact[1:])}"
