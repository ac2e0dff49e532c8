"""Errors of the operations on MXNet's arrays: those of the other frameworks, and MXNetError as well.

Programs for older releases of Horovod catch MXNetError, which all errors of MXNet's own library are; new ones catch
what every framework raises (ValueError, NotImplementedError, HorovodInternalError). Each class here is both.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Final, ParamSpec, TypeVar

import mxnet as mx

from horovod.common import exceptions

__all__ = [
    "HorovodInternalError",
    "MXNetNotImplementedError",
    "MXNetValueError",
    "drop_errors",
    "kept",
    "lost_ranks",
    "mxnet_errors",
]

P = ParamSpec("P")
R = TypeVar("R")


class MXNetValueError(ValueError, mx.MXNetError):
    """An array or an argument that an operation can't take."""


class MXNetNotImplementedError(NotImplementedError, mx.MXNetError):
    """What no operation does."""


class HorovodInternalError(exceptions.HorovodInternalError, mx.MXNetError):
    """An operation that has failed: a rank was lost, or the ranks do not agree. Its name is in logs, which are read."""


_BOTH: Final[dict[type[Exception], type[Exception]]] = {
    ValueError: MXNetValueError,
    NotImplementedError: MXNetNotImplementedError,
    exceptions.HorovodInternalError: HorovodInternalError,
}


def mxnet_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Lets a function raise its errors as classes of this module, with the same text, notes, cause and traceback."""

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return function(*arguments, **options)
        except tuple(_BOTH) as error:
            if (both := _BOTH.get(type(error))) is None:  # a class derived from one of them stays as it is
                raise
            made = both(*error.args)
            vars(made).update(vars(error))
            raise made.with_traceback(error.__traceback__) from error.__cause__

    return call


# -- of the collectives in a backward pass -----------------------------------------------------------------------------
# MXNet runs them after the script's call of backward() has returned. It prints what such a call raises, and drops it;
# whoever waits for the gradient gets an MXNetError which says only that a function has failed. So the error is kept
# here, and raised in the place of that MXNetError.

_FUNCTION_FAILED: Final = "CustomFunctionBwdFunc"  # part of the text of the MXNetError
_errors: Final[list[exceptions.HorovodInternalError]] = []  # errors that threads of MXNet have added


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Around a collective in a backward pass."""
    try:
        yield
    except exceptions.HorovodInternalError as error:
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
        raise exceptions.HorovodInternalError(sentence) from error


def drop_errors() -> None:
    """Waits until MXNet has done all operations that are queued, and forgets the errors of failed operations, so that
    no later operation raises them.
    """
    with contextlib.suppress(Exception):  # the first one, of any class; the others are forgotten with it
        mx.nd.waitall()
    _errors.clear()
