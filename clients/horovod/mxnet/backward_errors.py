"""Errors of the collectives in a backward pass, which MXNet runs after the script's call of backward() has returned.

MXNet prints what such a call raises, and drops it; whoever waits for the gradient gets an MXNetError which says only
that a function has failed. So the error is kept here, and raised in the place of that MXNetError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import mxnet as mx

from horovod.common.exceptions import HorovodInternalError

__all__ = ["drop_errors", "kept", "lost_ranks"]

_FUNCTION_FAILED: Final = "CustomFunctionBwdFunc"  # part of the text of the MXNetError
_errors: Final[list[HorovodInternalError]] = []  # errors that threads of MXNet have added


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Around a collective in a backward pass."""
    try:
        yield
    except HorovodInternalError as error:
        _errors.append(error)
        raise


@contextlib.contextmanager
def lost_ranks() -> Iterator[None]:
    """Around what waits for arrays: raises HorovodInternalError, with the sentence of the first error that is kept, in
    place of the MXNetError of a collective that has failed. Other errors pass.
    """
    try:
        yield
    except mx.MXNetError as error:
        if _FUNCTION_FAILED not in str(error) or not _errors:
            raise
        sentence = str(_errors[0])
        _errors.clear()
        raise HorovodInternalError(sentence) from error


def drop_errors() -> None:
    """Waits until MXNet has done all operations that are queued, and forgets the errors of those that have failed, so
    that no later operation raises them.
    """
    with contextlib.suppress(Exception):  # the first one, of any class; the others are forgotten with it
        mx.nd.waitall()
    _errors.clear()
