"""Two tiers of tests: `make test` is short, `make test-all` runs what is left of CI.

All files of tests/extended belong to the second tier. A test elsewhere that does more of the same there, more cases or
more worlds, says so with the marker `longer` and takes its numbers from `pick`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
VARIABLE = "HOROVOD_TEST_TIER"
EXTENDED = os.environ.get(VARIABLE) == "extended"


def pick(short: T, extended: T) -> T:
    """The one for the tier that runs."""
    return extended if EXTENDED else short


def some(cases: Sequence[T], number: int) -> Sequence[T]:
    """So many of the cases, spread over them, in the short tier; all of them in the other one."""
    return pick([cases[place * len(cases) // number] for place in range(number)], list(cases))
