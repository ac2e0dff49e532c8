"""What compiled functions still have to do: JAX returns from a call of one before its collectives have run.

JAX may give the error of a call to every later one of its thread as well, as each waits for the one before. In a new
world they begin anew.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import jax
from jax._src import dispatch  # the tokens of ordered effects are nowhere else

from horovod.base.errors import code_of
from horovod.common.exceptions import HorovodInternalError

__all__ = ["at_exit", "end_compiled_calls", "lost_ranks", "wait_for_compiled_calls"]


@contextlib.contextmanager
def lost_ranks() -> Iterator[None]:
    """Turns JaxRuntimeErrors that contain a message of Horovod, with its code, into HorovodInternalError.

    XLA knows only JaxRuntimeError. Errors without such a message pass, and so do faults of the script
    (INVALID_ARGUMENT).
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if str(error).startswith("INVALID_ARGUMENT") or not any(map(code_of, str(error).splitlines())):
            raise
        raise HorovodInternalError(str(error)) from error


def wait_for_compiled_calls() -> None:
    """Returns when all collectives of compiled functions that this thread has called have run.

    Raises HorovodInternalError when one of them has failed.
    """
    with lost_ranks():
        jax.effects_barrier()


def end_compiled_calls() -> None:
    """Waits as wait_for_compiled_calls, but drops errors. Calls in the next world then wait for none of this one."""
    with contextlib.suppress(Exception):
        jax.effects_barrier()
    dispatch.runtime_tokens.clear()


def at_exit() -> None:
    """Lets the last step of a script that never looked at its results run. A script that has failed leaves at once."""
    if getattr(sys, "last_value", None) is None:
        end_compiled_calls()
    else:
        dispatch.runtime_tokens.clear()
