"""Errors of the operations on MXNet's arrays: those of the other frameworks, and MXNetError as well.

Programs for older releases of Horovod catch MXNetError, which all errors of MXNet's own library are; new ones catch
what every framework raises (ValueError, NotImplementedError, HorovodInternalError). Each class here is both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

import mxnet as mx

from horovod.common import exceptions

__all__ = ["HorovodInternalError", "MXNetNotImplementedError", "MXNetValueError", "mxnet_errors"]

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
