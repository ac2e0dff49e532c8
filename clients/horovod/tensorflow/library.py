"""TensorFlow's side of the native operations: the library is loaded here, and here Python answers what it asks.

The library (csrc/tensorflow) is built without TensorFlow and bound to the one that is imported, through TensorFlow's C
API for kernels (docs/adr/0048).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import tensorflow as tf
from tensorflow.python.autograph.impl.api import autograph_artifact

from horovod import _core
from horovod._core import DType
from horovod.base.errors import EngineCode, OperationCode, TrainingCode, WorldCode, code_of, coded
from horovod.common import counted_weights
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops.collectives import join
from horovod.common.ops.specs import set_number, set_size
from horovod.common.process_sets import ProcessSet, global_process_set, registered
from horovod.tensorflow.order.call_order import keep_order
from horovod.worker.runtime.context import current, place

_LIBRARY: Final = Path(_core.__file__).with_name("libhorovod_tensorflow.so")  # csrc/tensorflow/tensorflow.cmake

# Operations that meet by name. The order of a graph means nothing to them, and one that waited for another could wait
# for ever. Operations of the same name are put into an order (call_order.py).
_NAMED: Final = frozenset(
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


class Known(NamedTuple):
    """A dtype, as the engine and StableHLO call it. The numbers in C++ are in csrc/tensorflow/tf_api.cc."""

    engine: DType
    stablehlo: str


DTYPES: Final[dict[tf.DType, Known]] = {
    tf.bool: Known(DType.BOOL, "i1"),
    tf.int8: Known(DType.INT8, "i8"),
    tf.int16: Known(DType.INT16, "i16"),
    tf.int32: Known(DType.INT32, "i32"),
    tf.int64: Known(DType.INT64, "i64"),
    tf.uint8: Known(DType.UINT8, "ui8"),
    tf.uint16: Known(DType.UINT16, "ui16"),
    tf.uint32: Known(DType.UINT32, "ui32"),
    tf.uint64: Known(DType.UINT64, "ui64"),
    tf.half: Known(DType.FLOAT16, "f16"),
    tf.bfloat16: Known(DType.BFLOAT16, "bf16"),
    tf.float32: Known(DType.FLOAT32, "f32"),
    tf.float64: Known(DType.FLOAT64, "f64"),
}

_FLOATS_OF_8_BITS: Final = getattr(tf.dtypes, "experimental", None)  # there since TensorFlow 2.12
if _FLOATS_OF_8_BITS is not None:
    DTYPES[_FLOATS_OF_8_BITS.float8_e4m3fn] = Known(DType.FLOAT8_E4M3FN, "f8E4M3FN")
    DTYPES[_FLOATS_OF_8_BITS.float8_e5m2] = Known(DType.FLOAT8_E5M2, "f8E5M2")


def as_it_is(*functions: Callable[..., Any]) -> None:
    """AutoGraph, which rewrites Python in a tf.function, leaves these as they are: nothing in them depends on the value
    of a tensor. A mark costs no call.
    """
    for function in functions:
        autograph_artifact(function)


# -- questions ---------------------------------------------------------------------------------------------------------
def process_set_of(process_set_id: int) -> ProcessSet:
    """The process set that a node of a graph names. Raises ValueError where there is none (any more)."""
    process_set = global_process_set if process_set_id == 0 else registered(process_set_id)
    if process_set is None:
        raise ValueError(
            coded(
                OperationCode.NO_SUCH_SET,
                f"There is no process set with id {process_set_id}. Pass it to hvd.init(process_sets=[...]) or to "
                "hvd.add_process_set() on every rank first.",
            )
        )
    return process_set


def _size(process_set_id: int) -> int:
    return set_size(process_set_of(process_set_id))


def _number(process_set_id: int) -> int:
    current()  # ValueError: there is no world, or this process is the child of a rank
    return set_number(process_set_of(process_set_id), "Process set")


def _compare(number: int, call: int) -> int:
    counted_weights.compare(number, call)
    return 1


# In the order of Question in csrc/tensorflow/host.h.
_ANSWERS: Final[tuple[Callable[[int, int], int], ...]] = (
    lambda process_set_id, _: _size(process_set_id),
    lambda *_: place().local_size,
    lambda *_: place().rank,
    lambda *_: place().local_rank,
    lambda process_set_id, _: int(bool(process_set_of(process_set_id).included())),
    lambda process_set_id, _: _number(process_set_id),
    lambda *_: join(-1),
    lambda number, call: int(counted_weights.is_due(number, call)),
    _compare,
)


_NO_WORLD: Final = (TrainingCode.NOT_INITIALIZED, EngineCode.FORKED_CHILD, WorldCode.CHILD_OF_RANK)


def tensorflow_code(error: Exception) -> int:
    """The code of the error that TensorFlow has for an error of ours."""
    codes = tf.errors
    if isinstance(error, ValueError):
        no_world = code_of(error) in _NO_WORLD
        return int(codes.FAILED_PRECONDITION if no_world else codes.INVALID_ARGUMENT)
    return int(codes.UNKNOWN if isinstance(error, HorovodInternalError) else codes.CANCELLED)


@contextlib.contextmanager
def raised_as_tensorflow_does(operation: str) -> Iterator[None]:
    """Around what runs outside of an operation: its errors are those that the operation would have raised."""
    try:
        yield
    except Exception as error:
        of_tensorflow = tf.compat.v1.errors.exception_type_from_error_code(tensorflow_code(error))
        raise of_tensorflow(None, None, f"{error} [Op:{operation}]") from None


def _answer(question: int, about: int, call: int) -> tuple[int, int, str]:
    """Called by the library: 0 and the answer, or a code and why there is none.

    about: the id of a process set, or the number of a comparison, which `call` of a function makes.
    """
    try:
        return 0, int(_ANSWERS[question](about, call)), ""
    except Exception as error:  # nothing may be raised into TensorFlow's thread; what signals raise, the library keeps
        return tensorflow_code(error), 0, (str(error) or type(error).__name__).replace("\0", " ")


# -- loading -----------------------------------------------------------------------------------------------------------
def _load() -> Any:
    """A function for each operation. Raises ImportError with what to do."""
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
    api = ctypes.c_void_p(pointer(_core.C_API, b"horovod._core.C_API"))
    library.horovod_tensorflow_begin(api, ctypes.py_object(_answer))
    keep_order(_NAMED)
    raise_interrupt = ctypes.PyDLL(str(_LIBRARY)).horovod_tensorflow_raise_interrupt
    raise_interrupt.restype = None
    functions = {name: getattr(made, name) for name in dir(made) if name.startswith("horovod_")}
    return SimpleNamespace(**{name: _interruptible(one, raise_interrupt) for name, one in functions.items()})


def _interruptible(run: Callable[..., Any], raise_interrupt: Callable[[], None]) -> Callable[..., Any]:
    """A call of it ends with what a signal's handler has raised in its wait (Ctrl-C), not with TensorFlow's error."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Exception:
            try:
                raise_interrupt()
            except BaseException as interrupt:
                raise interrupt from None
            raise

    as_it_is(call)
    return call


@functools.cache
def xla_obstacle() -> str:
    """Why XLA can't compile the operations; "" if it can. The first call registers them with XLA."""
    library = ctypes.CDLL(str(_LIBRARY))
    library.horovod_tensorflow_register_xla.restype = ctypes.c_char_p
    return str(library.horovod_tensorflow_register_xla().decode())


OPS: Final = _load()
