"""Engines whose tensors are on GPUs, which the libraries in tests/native/gpu stand in for: rank r has GPU r.

A DeviceArray is what a framework's tensor is to the engine: an address, a device, and a stream on which it was written.
Reading one back waits for its stream, as a framework does; nothing else here waits for a device.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dlpack import CUDA, DLTensor
from resources import eventually
from world import ALLREDUCE, DTYPES, SUM, EngineWorld, Member, spec

from horovod import _core

_NAMES = {(0, 8): "int8", (0, 32): "int32", (0, 64): "int64", (0, 16): "int16", (1, 8): "uint8", (1, 16): "uint16"}
_NAMES |= {(1, 32): "uint32", (1, 64): "uint64"}
_NAMES |= {(2, 16): "float16", (2, 32): "float32", (2, 64): "float64", (4, 16): "bfloat16", (6, 8): "bool"}


class StandIns:
    """The libraries, loaded into this process; `files` where they are built already."""

    STOP = -1  # a fault: the process stops there

    def __init__(self, files: Sequence[str] = ()) -> None:
        if not files:
            from native_builds import gpu_libraries

            files = [str(file) for file in gpu_libraries()]
        self.cuda_file, self.nccl_file = files
        self.nvrtc_file = str(Path(self.nccl_file).with_name("libstandin_nvrtc.so"))
        self.cuda = ctypes.CDLL(self.cuda_file)
        self.nccl = ctypes.CDLL(self.nccl_file)
        self.nvrtc = ctypes.CDLL(self.nvrtc_file)
        for library, name in ((self.cuda, "standin_cuda_count"), (self.nccl, "standin_nccl_count")):
            getattr(library, name).restype = ctypes.c_int64
        self.cuda.standin_cuda_recorded.restype = ctypes.c_int64
        self.cuda.standin_cuda_hold.restype = ctypes.c_void_p
        self.cuda.standin_cuda_release.argtypes = [ctypes.c_void_p]
        self.check(self.cuda.cuInit(0))

    @staticmethod
    def check(result: int) -> None:
        assert result == 0, f"the stand-in for the driver answers {result}"

    def count(self, what: str) -> int:
        number = int(self.cuda.standin_cuda_count(what.encode()))
        return number if number >= 0 else int(self.nccl.standin_nccl_count(what.encode()))

    def counts(self) -> dict[str, int]:
        names = ("streams", "events", "blocks", "contexts", "pinned", "modules", "pools", "communicators", "operations")
        return {name: self.count(name) for name in names}

    def record(self) -> None:
        """Begins to record copies between devices and the host's page-locked memory."""
        self.cuda.standin_cuda_record()

    def recorded(self) -> list[tuple[int, str, int, int]]:
        """(device, "in" or "out" as the host sees it, address there, bytes) of each copy, as they were queued."""
        numbers = (ctypes.c_int64 * 40_000)()
        count = int(self.cuda.standin_cuda_recorded(numbers, 10_000))
        assert count <= 10_000
        rows = [numbers[4 * i : 4 * i + 4] for i in range(count)]
        return [(device, "in" if to_host else "out", address, size) for device, to_host, address, size in rows]

    def check_nothing_is_left(self, cycle: Callable[[bool], None]) -> None:
        """Of twenty worlds, each of which `cycle` makes, uses and ends: badly or well, in turn."""
        cycle(True)
        gc.collect()
        before = self.counts()
        for i in range(20):
            cycle(i % 2 == 1)

        def grown() -> dict[str, tuple[int, int]]:
            # What earlier tests have left to the devices may go meanwhile, so there may be less than before.
            return {name: (before[name], now) for name, now in self.counts().items() if now > before[name]}

        assert eventually(lambda: not grown()), grown()

    def fail(self, function: str, code: int, skip: int = 0) -> None:
        """The call of `function` after `skip` others fails, once."""
        plans = {"cu": self.cuda.standin_cuda_fail, "nc": self.nccl.standin_nccl_fail}
        plans.get(function[:2], self.nvrtc.standin_nvrtc_fail)(function.encode(), code, skip)


def ended(engine: _core.Engine) -> str | None:
    """Why its epoch is over; None while it is not."""
    try:
        engine.check()
    except RuntimeError as error:
        return str(error)
    return None


class Gpu:
    """A framework's view of one device: its context and streams."""

    def __init__(self, libraries: StandIns, ordinal: int) -> None:
        self.libraries = libraries
        self.ordinal = ordinal
        self._context = ctypes.c_void_p()
        libraries.check(libraries.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), ordinal))
        self._streams: list[int] = []
        self._holds: set[int] = set()

    def __del__(self) -> None:  # when nobody has an array of it any more
        for stream in self._streams:
            self.libraries.check(self.libraries.cuda.cuStreamDestroy_v2(ctypes.c_void_p(stream)))
        self.libraries.check(self.libraries.cuda.cuDevicePrimaryCtxRelease_v2(self.ordinal))

    def __enter__(self) -> Gpu:
        self.libraries.check(self.libraries.cuda.cuCtxPushCurrent_v2(self._context))
        return self

    def __exit__(self, *exc: object) -> None:
        self.libraries.check(self.libraries.cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())))

    def stream(self) -> int:
        made = ctypes.c_void_p()
        with self:
            self.libraries.check(self.libraries.cuda.cuStreamCreateWithPriority(ctypes.byref(made), 1, 0))
        assert made.value is not None
        self._streams.append(made.value)
        return made.value

    def synchronize(self, stream: int = 0) -> None:
        with self:
            self.libraries.check(self.libraries.cuda.cuStreamSynchronize(ctypes.c_void_p(stream)))

    def hold(self, stream: int = 0) -> int:
        """Stops a stream where it is; what is queued there from now on waits for release()."""
        with self:
            held = self.libraries.cuda.standin_cuda_hold(ctypes.c_void_p(stream))
        assert held
        self._holds.add(held)
        return int(held)

    def release(self, held: int) -> None:
        self._holds.remove(held)
        self.libraries.cuda.standin_cuda_release(held)

    def release_all(self) -> None:
        for held in list(self._holds):
            self.release(held)

    @contextmanager
    def capture(self, stream: int) -> Iterator[None]:
        """What is queued on the stream inside becomes a graph. Fails where something has spoilt that."""
        with self:
            self.libraries.check(self.libraries.cuda.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), 0))
            yield
            graph = ctypes.c_void_p()
            self.libraries.check(self.libraries.cuda.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)))

    def array(self, values: np.ndarray, stream: int = 0) -> DeviceArray:
        return DeviceArray(self, values, stream)


class DeviceArray:
    """Memory of a device, allocated and filled in the order of a stream."""

    def __init__(self, gpu: Gpu, values: np.ndarray, stream: int = 0) -> None:
        values = np.asarray(values)
        self.gpu, self.stream, self.dtype, self.shape = gpu, stream, values.dtype, values.shape
        address = ctypes.c_uint64()
        cuda, check = gpu.libraries.cuda, gpu.libraries.check
        self._source = np.ascontiguousarray(values)  # until it has been copied
        with gpu:
            on = ctypes.c_void_p(stream)
            check(cuda.cuMemAllocAsync(ctypes.byref(address), ctypes.c_size_t(max(1, values.nbytes)), on))
            self.address = address.value
            source, size = ctypes.c_uint64(self._source.ctypes.data), ctypes.c_size_t(values.nbytes)
            check(cuda.cuMemcpyAsync(ctypes.c_uint64(self.address), source, size, on))

    def numpy(self, stream: int | None = None) -> np.ndarray:
        """The values that `stream` leaves there."""
        self.gpu.synchronize(self.stream if stream is None else stream)
        return read(self.address, self.dtype, self.shape)

    def __del__(self) -> None:
        with self.gpu:
            self.gpu.libraries.cuda.cuMemFreeAsync(ctypes.c_uint64(self.address), ctypes.c_void_p(self.stream))


def read(address: int, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    count = int(np.prod(shape))
    data = ctypes.string_at(address, count * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape).copy()


class AdoptedArray:
    """What a framework makes of a DLPack capsule of the engine."""

    def __init__(self, output: Any, gpu: Gpu, stream: int) -> None:
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        self._capsule = output.dlpack()
        tensor = DLTensor.from_address(pointer(self._capsule, b"dltensor"))
        assert (tensor.device_type, tensor.device_id, tensor.byte_offset) == (CUDA, gpu.ordinal, 0)
        self.gpu, self.stream = gpu, stream
        self.address = tensor.data
        self.name = _NAMES[tensor.type_code, tensor.type_bits]
        self.dtype = np.dtype("uint16" if self.name == "bfloat16" else self.name)
        self.shape = tuple(tensor.shape[i] for i in range(tensor.dimensions))

    def numpy(self) -> np.ndarray:
        self.gpu.synchronize(self.stream)
        return read(self.address, self.dtype, self.shape)


class GpuMember(Member):
    """A rank whose operations take and give arrays of its GPU, on its current stream."""

    def __init__(self, engine: Any, rank: int, size: int, gpu: Gpu) -> None:
        super().__init__(engine, rank, size)
        self.gpu = gpu
        self.current_stream = 0

    def start(
        self, kind: int, name: str, arrays: list[DeviceArray], outputs: list[DeviceArray | None], **kw: Any
    ) -> _core.Handle:
        dtype = kw.pop("dtype", None)
        where = (self.gpu.ordinal, self.current_stream)
        tensors = [
            (a.address, 0 if o is None else o.address, DTYPES[dtype or str(a.dtype)], a.shape, *where)
            for a, o in zip(arrays, outputs, strict=True)
        ]
        return self.engine.submit(
            spec(kind, kw), name, tensors, keep=(arrays, outputs), finish=lambda results: results, **kw
        )

    def finish(self, handle: _core.Handle) -> list[AdoptedArray] | tuple[list[AdoptedArray], list[int]] | None:
        stream = self.current_stream
        result = handle.result(stream)
        if result is None:
            return None
        if isinstance(result, tuple):
            return [AdoptedArray(one, self.gpu, stream) for one in result[0]], result[1]
        return [AdoptedArray(one, self.gpu, stream) for one in result]

    def array(self, values: np.ndarray) -> DeviceArray:
        return self.gpu.array(values, self.current_stream)

    def submit(
        self, kind: int, name: str, arrays: list[np.ndarray], outputs: list[np.ndarray | None], **kw: Any
    ) -> _core.Handle:
        """What a Member does with arrays of NumPy, by way of the GPU: the matrix of test_collectives.py as it is."""
        sent = [self.array(a) for a in arrays]
        same = [o is a for a, o in zip(arrays, outputs, strict=True)]
        into = [
            d if alike else None if o is None else self.array(o)
            for d, o, alike in zip(sent, outputs, same, strict=True)
        ]
        handle = self.start(kind, name, sent, into, **kw)
        self._keep[handle] = (into, outputs)
        return handle

    def wait(self, handle: _core.Handle) -> Any:
        result = self.finish(handle)
        into, outputs = self._keep.pop(handle)
        if result is None:
            for device, host in zip(into, outputs, strict=True):
                np.copyto(host, device.numpy(self.current_stream))
            return outputs[0] if len(outputs) == 1 else outputs
        if isinstance(result, tuple):
            return result[0][0].numpy(), result[1]
        taken = [one.numpy() for one in result]
        return taken[0] if len(taken) == 1 else taken


class GpuWorld(EngineWorld):
    """EngineWorld of members with a GPU each; `transport` is what the CPUs talk over.

    without_nccl: these ranks don't find it.
    """

    def __init__(
        self,
        libraries: StandIns,
        size: int,
        transport: str = "in_process",
        without_nccl: Sequence[int] = (),
        more_files: Mapping[str, str] | None = None,
        hosts: Sequence[int] | None = None,
        placement: Sequence[int] = (),
        **options: int,
    ) -> None:
        self.libraries = libraries
        self.gpus = [Gpu(libraries, rank) for rank in range(size)]
        files = [
            {
                "cuda_file": libraries.cuda_file,
                "nccl_file": "/nowhere/libnccl.so.2" if rank in without_nccl else libraries.nccl_file,
                "nvrtc_file": libraries.nvrtc_file,
                **(more_files or {}),
            }
            for rank in range(size)
        ]
        self.uses_nccl = not without_nccl
        super().__init__(size, transport, files=files, hosts=hosts, placement=placement, **options)
        self.members: list[GpuMember] = [  # type: ignore[assignment]
            GpuMember(engine, rank, size, self.gpus[rank]) for rank, engine in enumerate(self.engines)
        ]

    def __exit__(self, *exc: object) -> None:
        for gpu in self.gpus:
            gpu.release_all()  # of a test that failed; the engines wait for what is queued
        super().__exit__(*exc)


def start(member: GpuMember, array: DeviceArray, name: str = "allreduce.x") -> _core.Handle:
    return member.start(ALLREDUCE, name, [array], [array], reduce_op=SUM)


def now(array: DeviceArray) -> np.ndarray:
    """What is in the memory, whatever is still queued."""
    return read(array.address, array.dtype, array.shape)


def ones(member: GpuMember, count: int = 4) -> DeviceArray:
    return member.array(np.ones(count, np.float32))


def expect_error(action: Callable[[], Any], error: type[Exception], pattern: str) -> None:
    with pytest.raises(error, match=pattern):
        action()
