"""Tensors on a GPU where none is: memory of the library that stands in for the driver (tests/native/gpu).

PyTorch for CPUs has no tensors on a GPU, so these are tensors on that memory which say that they are on one, and whose
operations go where those of a GPU go: they are queued on torch's current stream. What the host has to read, like a
number or how many elements are not zero, waits for the stream first. Horovod's part is real: its engine calls the
stand-ins for the driver and for NCCL as it calls the real ones, in as many processes as there are ranks.

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
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from dlpack import CUDA, DLTensor
from torch.utils._pytree import tree_leaves, tree_map

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
    """A tensor that PyTorch takes for one on GPU 0. Its elements are in the stand-in driver's memory.

    `memory` is a plain CPU tensor over the same elements: every operation is computed with it.
    """

    is_cpu, is_cuda = False, True
    device = torch.device("cuda", 0)
    memory: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.masked_fill.Scalar and not isinstance(args[1], OnGpu):
            raise RuntimeError("masked_fill: expected self and mask to be on the same device")  # as CUDA's says
        plain = tree_map(_memory_of, (args, kwargs or {}))
        if function._schema.is_mutable:
            queue(lambda: _without_gradients(function, *plain))
            if function is torch.ops.aten.copy_.default and not isinstance(args[0], OnGpu) and not any(args[2:]):
                synchronize()  # a copy to the host, which waits
            return args[0] if function._schema.returns else None
        if not _only_views(function):
            made = _empty_results(function, *plain)
            if made is not None:
                into = tree_map(_memory_of, made)
                queue(lambda: _fill(into, _without_gradients(function, *plain)))
                return made
            synchronize()
        on = {one.untyped_storage().data_ptr() for one in tree_leaves(plain) for one in _parts(one)}

        def wrapped(result: Any) -> Any:
            if not isinstance(result, torch.Tensor):
                return result
            here = all(part.untyped_storage().data_ptr() in on for part in _parts(result))
            return _wrapped(result) if here else on_gpu(result)

        return tree_map(wrapped, function(*plain[0], **plain[1]))

    def cpu(self, *_: Any, non_blocking: bool = False, **__: Any) -> torch.Tensor:  # type: ignore[override]
        if not non_blocking:
            synchronize()
            return self.memory.clone()
        there = torch.zeros_like(self.memory)
        queue(lambda: there.copy_(self.memory))
        return there

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        moved: torch.Tensor = self.cpu(**kwargs) if args[:1] == ("cpu",) else super().to(*args, **kwargs)
        return moved


def _only_views(function: Any) -> bool:
    """Whether the results are on the memory of the arguments, and nothing of it is read."""
    if function is torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default:
        return True
    return any(result.alias_info is not None for result in function._schema.returns)


def _empty_results(function: Any, args: Any, kwargs: Any) -> Any:
    """Tensors for the results, whose sizes don't depend on what is in memory; None where they do."""
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(function.tags):
        return None
    if any(isinstance(one, torch.Tensor) and one.layout is not torch.strided for one in tree_leaves((args, kwargs))):
        return None
    args, kwargs = tree_map(lambda one: one.to("meta") if isinstance(one, torch.Tensor) else one, (args, kwargs))
    try:
        results = function(*args, **kwargs)
    except NotImplementedError:  # as of what makes a sparse tensor
        return None
    if any(not isinstance(one, torch.Tensor) or one.layout is not torch.strided for one in tree_leaves(results)):
        return None
    return tree_map(lambda one: _wrapped(_allocate(one.dtype, one.shape)), results)


def _fill(into: Any, results: Any) -> None:
    for memory, result in zip(tree_leaves(into), tree_leaves(results), strict=True):
        memory.copy_(result)


def _parts(tensor: Any) -> list[torch.Tensor]:
    """The dense tensors that a tensor, maybe a sparse one, consists of."""
    if not isinstance(tensor, torch.Tensor):
        return []
    return [tensor._indices(), tensor._values()] if tensor.layout is torch.sparse_coo else [tensor]


def on_gpu(values: Any, dtype: torch.dtype | None = None) -> OnGpu:
    """A copy there; `values` is a plain tensor or what torch.tensor takes."""
    values = torch.as_tensor(values)
    if values.layout is torch.sparse_coo:
        parts = [on_gpu(part).memory for part in _parts(values)]
        coalesced = values.is_coalesced()
        return _wrapped(torch.sparse_coo_tensor(*parts, values.shape, is_coalesced=coalesced, check_invariants=False))
    values = values.to(dtype or values.dtype).contiguous()
    memory = _allocate(values.dtype, values.shape)
    if values.numel():
        queue(lambda: memory.copy_(values))
    return _wrapped(memory)


def _allocate(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    address, where = ctypes.c_uint64(), ctypes.c_void_p(stream)
    size = max(1, math.prod(shape) * dtype.itemsize)
    _check(cuda.cuMemAllocAsync(ctypes.byref(address), ctypes.c_size_t(size), where))
    return _view(address.value, dtype, shape, lambda: cuda.cuMemFreeAsync(address, where))


class _CurrentStream:
    """torch.cuda.Stream, as far as Horovod asks."""

    def __init__(self, device: int | torch.device) -> None:
        assert device in (OnGpu.device, OnGpu.device.index)
        self.cuda_stream = stream

    def record_event(self) -> _Event:
        return _Event(self.cuda_stream)


class _Event:
    """torch.cuda.Event, as far as Horovod asks."""

    def __init__(self, recorded_on: int) -> None:
        self._handle = ctypes.c_void_p()
        _check(cuda.cuEventCreate(ctypes.byref(self._handle), 2))
        _check(cuda.cuEventRecord(self._handle, ctypes.c_void_p(recorded_on)))

    def query(self) -> bool:
        return int(cuda.cuEventQuery(self._handle)) == 0

    def __del__(self) -> None:
        cuda.cuEventDestroy_v2(self._handle)


def _without_gradients(function: Any, args: Any, kwargs: Any) -> Any:
    with torch.no_grad():  # which the thread that called was in
        return function(*args, **kwargs)


def _memory_of(value: Any) -> Any:
    return value.memory if isinstance(value, OnGpu) else value


def _wrapped(memory: torch.Tensor) -> OnGpu:
    # .data, so that changes are counted when they are queued, as those of a tensor on a GPU are.
    made: OnGpu = torch.Tensor._make_subclass(OnGpu, memory.data)
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
