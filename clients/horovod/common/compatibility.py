"""Names that scripts, libraries and the tests of earlier releases use, though no page ever promised them.

Each stands where they look for it and does what its name says by means of what is public. docs/api.md lists them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from packaging.version import Version

from horovod.common import basics
from horovod.common.ops.specs import reduce_op
from horovod.common.process_sets import registered_sets

F = TypeVar("F", bound=Callable[..., Any])


class HorovodBasics:
    """The functions of horovod.common.basics as methods: `_basics` of horovod.torch.mpi_ops and its likes."""

    def __init__(self, *_: object) -> None:
        """Takes where the library of an earlier release was."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(basics, name)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """The ranks of every process set, by its id. ValueError before hvd.init()."""
        everyone = list(range(basics.size()))
        return {0: everyone, **{number: list(one.ranks or ()) for number, one in sorted(registered_sets().items())}}


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version `ver` is `target` or later.

    >>> is_version_greater_equal_than("2.10.0", "2.9.1")
    True
    """
    return Version(ver) >= Version(target)


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """The op that two arguments ask for, of which `average` is deprecated; ValueError for both."""
    return reduce_op(op, average)


def _cache(f: F) -> F:
    """`f`, called once for each set of arguments."""
    return functools.cache(f)  # type: ignore[return-value]
