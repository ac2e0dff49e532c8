"""A GPU without a framework, whose import takes longer than all that failover.py does with it: memory and a stream.

Calls the driver's library that Horovod calls, by the same names; see csrc/backends/cuda/driver.h.
"""

from __future__ import annotations

import ctypes
import os


class DeviceError(Exception):
    """The driver refused something."""


class Device:
    """Rank r's is GPU r, counted around where there are fewer. Belongs to the thread that made it."""

    def __init__(self, rank: int, size: int) -> None:
        self._driver = ctypes.CDLL(os.environ.get("HOROVOD_CUDA_LIBRARY") or "libcuda.so.1")
        count, handle, context, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGetCount", ctypes.byref(count))
        self.ordinal = rank % count.value
        if size > count.value:
            share_a_gpu(rank)
        self._call("cuDeviceGet", ctypes.byref(handle), self.ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._call("cuCtxPushCurrent_v2", context)
        self._call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
        assert stream.value is not None
        self.stream = stream.value

    def zeros(self, size_bytes: int) -> int:
        """The address of memory that stays until the process ends."""
        address, on = ctypes.c_uint64(), ctypes.c_void_p(self.stream)
        self._call("cuMemAllocAsync", ctypes.byref(address), ctypes.c_size_t(size_bytes), on)
        self._call("cuMemsetD8Async", address, ctypes.c_ubyte(0), ctypes.c_size_t(size_bytes), on)
        return address.value

    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", ctypes.c_void_p(self.stream))

    def _call(self, function: str, *arguments: object) -> None:
        if result := getattr(self._driver, function)(*arguments):
            raise DeviceError(f"{function} failed with {result}.")


def share_a_gpu(rank: int) -> None:
    """NCCL refuses two ranks of a host on one GPU. Where each names a host of its own, it uses sockets between them."""
    os.environ["NCCL_HOSTID"] = f"horovod-benchmark-{rank}"
