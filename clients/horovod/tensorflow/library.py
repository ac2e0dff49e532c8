"""TensorFlow's side of the native operations: the library is loaded here, and here Python answers what it asks.

The library (csrc/tensorflow) is built without TensorFlow and bound to the one that is imported, through TensorFlow's C
API for kernels (docs/adr/0048).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

from horovod import _core
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops.collectives import join
from horovod.common.ops.specs import set_number, set_size
from horovod.common.process_sets import ProcessSet, global_process_set, registered
from horovod.worker.runtime.context import current

_LIBRARY: Final = Path(_core.__file__).with_name("libhorovod_tensorflow.so")  # csrc/tensorflow/tensorflow.cmake

# They meet by name, so the order of a graph means nothing to them, and one that waited for another could wait for ever.
_IN_NO_ORDER: Final = frozenset(
    f"Horovod{kind}"
    for kind in (
        "Allreduce",
        "GroupedAllreduce",
        "Allgather",
        "GroupedAllgather",
        "Broadcast",
        "GroupedBroadcast",
        "Alltoall",
        "Reducescatter",
        "GroupedReducescatter",
    )
)


# -- questions ---------------------------------------------------------------------------------------------------------
def process_set_of(process_set_id: int) -> ProcessSet:
    """The process set that a node of a graph names. Raises ValueError where there is none (any more)."""
    process_set = global_process_set if process_set_id == 0 else registered(process_set_id)
    if process_set is None:
        raise ValueError(
            f"There is no process set with id {process_set_id}. Pass it to hvd.init(process_sets=[...]) or to "
            "hvd.add_process_set() on every rank first."
        )
    return process_set


def _size(process_set_id: int) -> int:
    return set_size(process_set_of(process_set_id))


def _number(process_set_id: int) -> int:
    return set_number(process_set_of(process_set_id), "Process set")


# In the order of Question in csrc/tensorflow/host.h.
_ANSWERS: Final[tuple[Callable[[int], int], ...]] = (
    _size,
    lambda _: current().world.local_size,
    lambda _: current().world.rank,
    lambda _: current().world.local_rank,
    lambda process_set_id: int(bool(process_set_of(process_set_id).included())),
    _number,
    lambda _: join(-1),
    lambda _: 0,  # Python has run its signal handlers on the way here
)


def _code_of(error: BaseException) -> int:
    codes = tf.errors
    if isinstance(error, ValueError):
        initialized = "has not been initialized" not in str(error)
        return int(codes.INVALID_ARGUMENT if initialized else codes.FAILED_PRECONDITION)
    return int(codes.UNKNOWN if isinstance(error, HorovodInternalError) else codes.CANCELLED)


@ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.c_void_p, ctypes.c_size_t
)
def _answer(question: int, process_set_id: int, answer: Any, sentence: int, room: int) -> int:
    try:
        answer[0] = _ANSWERS[question](process_set_id)
    except BaseException as error:  # nothing may be raised into TensorFlow's thread
        answer[0] = 1
        text = (str(error) or type(error).__name__).encode()[: room - 1]
        ctypes.memmove(sentence, text + b"\0", len(text) + 1)
        return _code_of(error)
    return 0


# -- loading -----------------------------------------------------------------------------------------------------------
def _load() -> Any:
    """The module of TensorFlow with a function for each operation. Raises ImportError with what to do."""
    if not _LIBRARY.exists():
        raise ImportError(f"Horovod was installed without its operations for TensorFlow ({_LIBRARY} is missing).")
    made = tf.load_op_library(str(_LIBRARY))
    library = ctypes.CDLL(str(_LIBRARY))
    library.horovod_tensorflow_obstacle.restype = ctypes.c_char_p
    obstacle = library.horovod_tensorflow_obstacle().decode()
    if obstacle:
        raise ImportError(f"Horovod's operations can't be used with TensorFlow {tf.__version__}. {obstacle}")
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    library.horovod_tensorflow_begin(ctypes.c_void_p(pointer(_core.C_API, b"horovod._core.C_API")), _answer)
    auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS |= _IN_NO_ORDER
    return made


@functools.cache
def xla_obstacle() -> str:
    """Why XLA can't compile the operations; "" if it can. The first call registers them with XLA."""
    library = ctypes.CDLL(str(_LIBRARY))
    library.horovod_tensorflow_register_xla.restype = ctypes.c_char_p
    return str(library.horovod_tensorflow_register_xla().decode())


OPS: Final = _load()
