"""The library that XLA calls in what JAX compiles (csrc/jax, csrc/xla): it is loaded and registered here.

It is built without JAX. The interface to XLA is in C, and JAX hands it out (jax.ffi), so one build serves all versions.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
from pathlib import Path
from typing import Any, Final

import jax

from horovod import _core
from horovod.common.ops.specs import set_number
from horovod.common.process_sets import global_process_set, registered
from horovod.jax.waiting import at_exit

TARGET: Final = "horovod"
AFTER_ALL: Final = "horovod_after_all"

_LIBRARY: Final = Path(_core.__file__).with_name("libhorovod_jax.so")  # csrc/jax/jax.cmake


@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
def _set_number(process_set_id: int) -> int:
    """The engine's number of a process set plus one; 0: this rank is in no such set. Called by threads of XLA.

    What a signal's handler raises here is printed and dropped, as ctypes can't hand it on; so is all else: the answer
    is 0 then.
    """
    process_set = global_process_set if process_set_id == 0 else registered(process_set_id)
    if process_set is None:
        return 0
    try:
        return set_number(process_set, "Process set") + 1
    except ValueError:
        return 0


@functools.cache
def register() -> Any:
    """Makes the calls known to XLA; the first call does so. The library. Raises ImportError with what to do."""
    if not _LIBRARY.exists():
        raise ImportError(f"Horovod was installed without its library for JAX ({_LIBRARY} is missing).")
    library = ctypes.CDLL(str(_LIBRARY))
    library.horovod_jax_handler.restype = ctypes.c_void_p
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    api = ctypes.c_void_p(pointer(_core.C_API, b"horovod._core.C_API"))
    library.horovod_jax_begin(api, _set_number)
    for on_gpu, platform in enumerate(("cpu", "CUDA")):  # JAX keeps the second until it finds a GPU, if it ever does
        handler: Any = library.horovod_jax_handler(on_gpu)
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(ctypes.c_void_p(handler)), platform=platform)
    jax.ffi.register_ffi_target(AFTER_ALL, jax.ffi.pycapsule(library.horovod_jax_after_all), platform="cpu")
    atexit.register(at_exit)  # after hvd.init() has registered its own, so it runs before that
    return library
