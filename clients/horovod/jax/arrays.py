"""horovod.common.ops.framework for JAX: how the engine takes an array in the host's memory, and gives one back.

An array is read where it lies, once it is computed. A result is written into memory that an array is made on, before
anybody else has that array: to its user an array never changes.

Unless jax_enable_x64 is set, JAX makes 32 bits of everything that has 64, without a word. Here nothing is lost: arrays
of 64 bits travel as they are, and NumPy's come back as NumPy's (`is_wide`, `like_given`).
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import trace_state_clean
from jax._src.interpreters.pxla import batched_device_put  # jax.device_put takes ten times as long to call it
from jax.core import ShapedArray
from jax.sharding import SingleDeviceSharding

from horovod._core import DType, Output, TensorReader
from horovod.base.errors import OperationCode, coded
from horovod.common.ops.framework import Span
from horovod.common.ops.grouped import GroupedCollectives
from horovod.jax.devices import cpu

_ALIGNMENT: Final = 64  # XLA takes host memory over without a copy where it is aligned to this many bytes

# Not every version of JAX has all of them.
DTYPE_CODES: Final[dict[np.dtype[Any], int]] = {
    np.dtype(kind): int(dtype)
    for dtype in DType
    if (kind := getattr(jnp, {"BOOL": "bool_"}.get(dtype.name, dtype.name.lower()), None)) is not None
}
_WIDE: Final = frozenset(map(np.dtype, ("int64", "uint64", "float64")))
_DTYPES: Final = {code: dtype for dtype, code in DTYPE_CODES.items()}


class JaxFramework:
    """The adapter; see horovod.common.ops.framework.Framework."""

    def __init__(self) -> None:
        self.reader: Final = TensorReader((), self.view)

    @staticmethod
    def view(tensor: jax.Array) -> Span:
        code = JaxFramework.dtype(tensor)
        if code is None or _obstacle(tensor):
            raise refusal(tensor)
        address = tensor.block_until_ready().unsafe_buffer_pointer()
        return address, address, code, tensor.shape

    @staticmethod
    def dtype(tensor: jax.Array) -> int | None:
        return DTYPE_CODES.get(_checked(tensor).dtype)

    @staticmethod
    def shape(tensor: jax.Array) -> tuple[int, ...]:
        return _checked(tensor).shape

    @staticmethod
    def device(tensor: jax.Array) -> str:
        return " and ".join(sorted(str(device) for device in _checked(tensor).devices()))

    @staticmethod
    def allocate(tensor: jax.Array, *, filled: bool = False) -> jax.Array:
        if JaxFramework.dtype(tensor) is None or _obstacle(tensor):
            raise refusal(tensor)
        memory = _aligned(tensor.shape, tensor.dtype)
        if filled:
            np.copyto(memory, np.asarray(tensor))
        return _on(memory)

    @staticmethod
    def adopt(output: Output | jax.Array) -> jax.Array:
        assert isinstance(output, Output)
        dtype = _DTYPES[output.dtype]
        if output.nbytes == 0:
            return _on(np.empty(output.shape, dtype))
        return _on(np.frombuffer(memoryview(output).cast("B"), np.uint8).view(dtype).reshape(output.shape))

    @staticmethod
    def current_stream(device: int) -> int:
        raise NotImplementedError  # not reached: no array on a GPU gets this far


def as_array(tensor: Any, operation: str, name: str | None, path: str = "") -> jax.Array:
    """What a user gave as an array, or ValueError. Arrays that are traced stay as they are.

    path: where it is in the tree that was given, as "['a'][0]".
    """
    if isinstance(tensor, jax.Array):
        array = tensor
    else:
        try:
            array = _of_64_bits(tensor) if is_wide(tensor) else jnp.asarray(tensor)
        except OverflowError as error:
            sentence = (
                f"{tensor!r} does not fit into the 32 bits that JAX's numbers have now. Set jax_enable_x64, or outside "
                "of compiled functions give an array of NumPy, which travels as it is: numpy.asarray(value)."
            )
            where = _where(operation, name, path)
            raise ValueError(coded(OperationCode.UNSUPPORTED_DTYPE, sentence + where)) from error
        except (TypeError, ValueError) as error:
            raise refusal(tensor, operation, name, path) from error
    if array.dtype not in DTYPE_CODES:
        raise refusal(array, operation, name, path)
    return array


def is_wide(value: Any) -> bool:
    """Whether it is NumPy's and has 64 bits, of which JAX would drop half now."""
    return isinstance(value, np.ndarray | np.generic) and value.dtype in _WIDE and not jax.config.jax_enable_x64


def like_given(given: Any, result: jax.Array) -> Any:
    """The result for what a user gave: NumPy's for NumPy's that JAX can't keep in its dtype, else the array."""
    if not is_wide(given) or result.dtype not in _WIDE:
        return result
    values = np.array(result)
    return values[()] if isinstance(given, np.generic) else values


def _of_64_bits(tensor: Any) -> jax.Array:
    if trace_state_clean():
        with jax.enable_x64(True):
            return jnp.asarray(tensor)
    # A constant in a function that JAX compiles or differentiates, in which nothing has 64 bits.
    narrow = tensor.astype(jax.dtypes.canonicalize_dtype(tensor.dtype))
    is_kept = np.isfinite(narrow) == np.isfinite(tensor) if tensor.dtype.kind == "f" else narrow == tensor
    if not np.all(is_kept):
        raise OverflowError
    return jnp.asarray(narrow)


def refusal(tensor: Any, operation: str = "", name: str | None = None, path: str = "") -> ValueError:
    """Why the engine can't take `tensor`; the message says what to do."""
    given = _where(operation, name, path)
    if tensor is None and path:
        sentence = "None is no array. Leave it out of the tree, or put an array there."
        return ValueError(coded(OperationCode.NOT_A_TENSOR, sentence + given))
    if not isinstance(tensor, jax.Array):
        sentence = f"A jax.Array, or a value that jax.numpy.asarray accepts, is required, not {type(tensor).__name__}."
        return ValueError(coded(OperationCode.NOT_A_TENSOR, sentence + given))
    if tensor.dtype not in DTYPE_CODES:
        advice = " Send its .real and .imag." if jnp.issubdtype(tensor.dtype, jnp.complexfloating) else ""
        sentence = f"Arrays of {tensor.dtype} are not supported.{advice}"
        return ValueError(coded(OperationCode.UNSUPPORTED_DTYPE, sentence + given))
    return ValueError(coded(OperationCode.UNSUPPORTED_DEVICE, f"The array {_obstacle(tensor)}{given}"))


def _where(operation: str, name: str | None, path: str) -> str:
    """What was given where, as a sentence."""
    called = operation if name is None else f"{operation}.{name}"
    if path:
        return f" It is the leaf {path} of the argument of {called}."
    return "" if name is None else f" It was given as '{called}'."


def _checked(tensor: Any) -> jax.Array:
    if not isinstance(tensor, jax.Array):
        raise refusal(tensor)
    return tensor


def _obstacle(tensor: jax.Array) -> str:
    """Why an array can't be read where it is, and what to do, to end a sentence; "" where it can."""
    devices = tensor.devices()
    if len(devices) != 1:
        return (
            f"is on {len(devices)} devices, and Horovod has one process for each device. Give each process its own "
            "part, for example array.addressable_data(0)."
        )
    (device,) = devices
    if device.platform != "cpu":
        return (
            f"is on {device}, and this version sends arrays of JAX from CPUs and from GPUs with CUDA. Move it with "
            'jax.device_put(array, jax.devices("cpu")[0]).'
        )
    return ""


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    first = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[first : first + nbytes].view(dtype).reshape(shape)


def _on(memory: np.ndarray[Any, Any]) -> jax.Array:
    """An array on this memory. It is the default device's where that is the host, else of JAX's first CPU."""
    is_default = jax.default_backend() == "cpu"
    if is_default and memory.dtype.itemsize < 8 and jax.config.jax_default_device is None:
        device = cpu()
        aval = _aval(memory.shape, memory.dtype)
        return batched_device_put(aval, _sharding(device), [memory], [device], committed=False)
    device = None if is_default else cpu()
    if memory.dtype.itemsize == 8:
        with jax.enable_x64(True):  # else it would have 32 bits
            return jax.device_put(memory, device, may_alias=True)
    return jax.device_put(memory, device, may_alias=True)


@functools.lru_cache(maxsize=4)
def _sharding(device: jax.Device) -> SingleDeviceSharding:
    return SingleDeviceSharding(device)


@functools.lru_cache(maxsize=1024)
def _aval(shape: tuple[int, ...], dtype: np.dtype[Any]) -> ShapedArray:
    return ShapedArray(shape, dtype)


COLLECTIVES: Final = GroupedCollectives[jax.Array](JaxFramework())
