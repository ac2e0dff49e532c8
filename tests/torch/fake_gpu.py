"""Tensors on a GPU where none is: memory of the library that stands in for the driver (tests/native/gpu).

PyTorch for CPUs has no tensors on a GPU, so these are tensors on that memory which say that they are on one, and whose
operations go where those of a GPU go: what changes a tensor in place is queued on torch's current stream, and whatever
gives a new tensor waits for the stream first, as if it were read by the host. Horovod's part is real: its engine calls
the stand-ins for the driver and for NCCL as it calls the real ones, in as many processes as there are ranks.

    install(files, 0)               once in a process; HOROVOD_CUDA_LIBRARY and HOROVOD_NCCL_LIBRARY name the same
    x = on_gpu(torch.ones(3))
    held = hold()                   the stream stands still; nothing that is queued from now on happens
    hvd.allreduce_(x); x.add_(1)    return at once
    release(held); x.cpu()
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).parents[1]))  # of processes that only find what is beside this file

from dlpack import CUDA, DLTensor

_DTYPES = {(0, 8): "int8", (0, 16): "int16", (0, 32): "int32", (0, 64): "int64", (1, 8): "uint8", (6, 8): "bool"}
_DTYPES |= {(2, 16): "float16", (2, 32): "float32", (2, 64): "float64", (4, 16): "bfloat16"}
_DTYPES |= {(1, 16): "uint16", (1, 32): "uint32", (1, 64): "uint64"}


cuda: Any = None
nccl: Any = None
stream = 0  # torch's current one
_kernels: dict[int, Callable[[], object]] = {}  # queued, by number
_numbers = itertools.count(1)
_streams: list[int] = []
# One for all: a callback must not be freed while it runs.
_run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda number: _kernels.pop(number)())


def install(files: Sequence[str], ordinal: int) -> None:
    """GPU `ordinal` is this process's, with a stream of its own; torch's current stream is that one from now on."""
    global cuda, nccl, stream
    from horovod.torch import tensors

    cuda, nccl = (ctypes.CDLL(file) for file in files)
    cuda.standin_cuda_count.restype = nccl.standin_nccl_count.restype = ctypes.c_int64
    cuda.standin_cuda_hold.restype = ctypes.c_void_p
    context = ctypes.c_void_p()
    _check(cuda.cuInit(0))
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal))
    _check(cuda.cuCtxPushCurrent_v2(context))
    OnGpu.device = torch.device("cuda", ordinal)
    stream = new_stream()
    atexit.register(_finish)
    torch.cuda.current_stream = _CurrentStream  # type: ignore[assignment]
    tensors._from_dlpack = _adopt  # type: ignore[assignment]


def new_stream() -> int:
    made = ctypes.c_void_p()
    _check(cuda.cuStreamCreateWithPriority(ctypes.byref(made), 1, 0))
    assert made.value is not None
    _streams.append(made.value)
    return made.value


def synchronize() -> None:
    """Waits until the current stream has nothing left to do."""
    _check(cuda.cuStreamSynchronize(ctypes.c_void_p(stream)))


def _finish() -> None:
    """Before the interpreter ends: a stream must not come to a kernel of ours after that."""
    for made in _streams:
        cuda.cuStreamSynchronize(ctypes.c_void_p(made))


def hold() -> int:
    """Stops the current stream where it is; the answer is for `release`."""
    held: int = cuda.standin_cuda_hold(ctypes.c_void_p(stream))
    assert held
    return held


def release(held: int) -> None:
    cuda.standin_cuda_release(ctypes.c_void_p(held))


def count(what: str) -> int:
    """How many streams, events, blocks, contexts, communicators, operations, groups or aborts there are."""
    number: int = cuda.standin_cuda_count(what.encode())
    return number if number >= 0 else nccl.standin_nccl_count(what.encode())


def fail(function: str, code: int) -> None:
    """The next call of `function` fails."""
    plan = cuda.standin_cuda_fail if function.startswith("cu") else nccl.standin_nccl_fail
    plan(function.encode(), code, 0)


def queue(kernel: Callable[[], object]) -> None:
    """Lets the current stream run `kernel` when it comes to it."""
    number = next(_numbers)
    _kernels[number] = kernel
    _check(cuda.cuLaunchHostFunc(ctypes.c_void_p(stream), _run, ctypes.c_void_p(number)))


class OnGpu(torch.Tensor):
    """`memory` is the same memory as a plain tensor."""

    is_cpu, is_cuda = False, True
    device = torch.device("cuda", 0)
    memory: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = tree_map(_memory_of, (args, kwargs or {}))
        if function._schema.is_mutable:
            queue(lambda: _without_gradients(function, plain_args, plain_kwargs))
            return args[0] if function._schema.returns else None
        synchronize()
        on = {one.untyped_storage().data_ptr() for one in tree_leaves(plain_args) if isinstance(one, torch.Tensor)}

        def wrapped(result: Any) -> Any:
            if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
                return result
            return _wrapped(result) if result.untyped_storage().data_ptr() in on else on_gpu(result)

        return tree_map(wrapped, function(*plain_args, **plain_kwargs))

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:  # type: ignore[override]
        synchronize()
        return self.memory.clone()


def on_gpu(values: Any, dtype: torch.dtype | None = None) -> OnGpu:
    """A copy there; `values` is a plain tensor or what torch.tensor takes."""
    values = torch.as_tensor(values)
    values = values.to(dtype or values.dtype).contiguous()
    address, where = ctypes.c_uint64(), ctypes.c_void_p(stream)
    _check(cuda.cuMemAllocAsync(ctypes.byref(address), ctypes.c_size_t(max(1, values.nbytes)), where))
    memory = _view(address.value, values.dtype, values.shape, lambda: cuda.cuMemFreeAsync(address, where))
    if values.numel():
        queue(lambda: memory.copy_(values))
    return _wrapped(memory)


class _CurrentStream:
    """torch.cuda.Stream, as far as Horovod asks."""

    def __init__(self, device: int) -> None:
        assert device == OnGpu.device.index
        self.cuda_stream = stream


def _without_gradients(function: Any, args: Any, kwargs: Any) -> None:
    with torch.no_grad():  # which the thread that called was in
        function(*args, **kwargs)


def _memory_of(value: Any) -> Any:
    return value.memory if isinstance(value, OnGpu) else value


def _wrapped(memory: torch.Tensor) -> OnGpu:
    made: OnGpu = torch.Tensor._make_subclass(OnGpu, memory)
    made.memory = memory
    return made


def _view(address: int, dtype: torch.dtype, shape: Sequence[int], give_back: Callable[[], object]) -> torch.Tensor:
    """The memory as a tensor; `give_back` is called when no tensor is on it any more."""
    elements = math.prod(shape)
    block = (ctypes.c_char * max(1, elements) * dtype.itemsize).from_address(address)
    weakref.finalize(block, give_back).atexit = False
    return torch.frombuffer(block, dtype=dtype, count=max(1, elements))[:elements].reshape(tuple(shape))


def _adopt(capsule: object) -> OnGpu:
    """What torch makes of a DLPack capsule."""
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    described = DLTensor.from_address(pointer_of(capsule, b"dltensor"))
    assert (described.device_type, described.device_id) == (CUDA, OnGpu.device.index)
    dtype = getattr(torch, _DTYPES[described.type_code, described.type_bits])
    shape = described.shape[: described.dimensions]
    kept = [capsule]  # gives the memory back when it goes
    if not described.data:
        return on_gpu(torch.empty(shape, dtype=dtype))
    return _wrapped(_view(described.data, dtype, shape, kept.clear))


def _check(result: int) -> None:
    assert result == 0, f"the stand-in for the driver answers {result}"
