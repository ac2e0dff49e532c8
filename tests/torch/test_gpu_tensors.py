"""How horovod.torch hands tensors on a GPU to the engine and takes results back.

PyTorch for CPUs has no such tensors, so these are memory of the libraries that stand in for the driver and for NCCL
(tests/native/gpu), as tensors that say that they are on a GPU. For the engine see tests/engine/test_gpu_*.py;
here it is a world of one, whose operations are real calls of NCCL all the same.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from native_builds import gpu_libraries

pytestmark = pytest.mark.xdist_group("gpu")


@pytest.fixture(scope="module")
def files() -> list[str]:
    return [str(file) for file in gpu_libraries()]


PRELUDE = """
import ctypes, gc, sys
import torch
import horovod.torch as hvd
from horovod.torch import tensors

cuda = ctypes.CDLL(sys.argv[1])
cuda.standin_cuda_count.restype = ctypes.c_int64
assert cuda.cuInit(0) == 0
context = ctypes.c_void_p()
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxPushCurrent_v2(context) == 0


def new_stream():
    stream = ctypes.c_void_p()
    assert cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
    return stream.value


class OnGpu(torch.Tensor):
    is_cpu, is_cuda = False, True
    device = torch.device("cuda", 0)


def on_gpu(values, dtype=torch.float32):
    values = torch.tensor(values, dtype=dtype)
    address = ctypes.c_uint64()
    assert cuda.cuMemAllocAsync(ctypes.byref(address), ctypes.c_size_t(max(1, values.nbytes)), None) == 0
    assert cuda.cuStreamSynchronize(None) == 0
    memory = (ctypes.c_char * max(1, values.nbytes)).from_address(address.value)
    made = torch.frombuffer(memory, dtype=dtype, count=values.numel()).reshape(values.shape)
    made.copy_(values)
    return made.as_subclass(OnGpu)


def plain(tensor):
    assert cuda.cuStreamSynchronize(ctypes.c_void_p(stream)) == 0
    return tensor.as_subclass(torch.Tensor).tolist()


stream = new_stream()
asked = []


class Stream:
    def __init__(self, device):
        asked.append(device)
        self.cuda_stream = stream


torch.cuda.current_stream = Stream
hvd.init()
"""


def run(files: list[str], script: str) -> None:
    given = {"HOROVOD_CUDA_LIBRARY": files[0], "HOROVOD_NCCL_LIBRARY": files[1]}
    command = [sys.executable, "-c", PRELUDE + script, *files]
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_in_place(files: list[str]) -> None:
    run(
        files,
        """
x = on_gpu([1.0, 2.0, 3.0])
assert hvd.allreduce_(x, op=hvd.Sum, postscale_factor=2.0) is x
assert plain(x) == [2.0, 4.0, 6.0]
hvd.broadcast_(x, 0)
group = [on_gpu([1.0]), on_gpu([2], torch.int64)]
hvd.grouped_allreduce_(group, op=hvd.Max)
assert [plain(one) for one in group] == [[1.0], [2]]
assert set(asked) == {0}
""",
    )


def test_a_handle_lets_the_stream_wait_that_is_current_then(files: list[str]) -> None:
    run(
        files,
        """
x = on_gpu([1.0, 2.0])
first = stream
cuda.standin_cuda_hold.restype = ctypes.c_void_p
held = cuda.standin_cuda_hold(ctypes.c_void_p(first))
handle = hvd.allreduce_async_(x, op=hvd.Sum, prescale_factor=3.0)
stream = new_stream()
assert hvd.synchronize(handle) is x  # though the first stream stands still
assert x.as_subclass(torch.Tensor).tolist() == [1.0, 2.0]
cuda.standin_cuda_release(ctypes.c_void_p(held))
assert plain(x) == [3.0, 6.0]
""",
    )


def test_results_of_the_engine_are_adopted(files: list[str]) -> None:
    run(
        files,
        """
class Adopted:
    def __init__(self, capsule):
        self.capsule = capsule

tensors._from_dlpack = Adopted
gathered = hvd.allgather(on_gpu([[1, 2], [3, 4]], torch.int32))
assert "dltensor" in repr(gathered.capsule)
parts = hvd.synchronize(hvd.grouped_reducescatter_async([on_gpu([[1.0]]), on_gpu([[2.0]])], op=hvd.Sum))
assert len(parts) == 2
received, splits = hvd.alltoall(on_gpu([1.0, 2.0]), splits=[2])
assert splits.tolist() == [2]
blocks = cuda.standin_cuda_count(b"blocks")
del gathered, parts, received
x = on_gpu([1.0])
for _ in range(10_000):  # each operation looks at what the device has done since
    hvd.allreduce_(x)
    assert cuda.cuStreamSynchronize(ctypes.c_void_p(stream)) == 0
    if cuda.standin_cuda_count(b"blocks") <= blocks - 3:  # four results less, one tensor more
        break
else:
    raise AssertionError("the results were not given back")
""",
    )


def test_what_is_missing_is_told(files: list[str]) -> None:
    """Both when an optimizer is made and when a tensor comes."""
    run(
        [files[0], "/nowhere/libnccl.so.2"],
        """
for action in (lambda: hvd.allreduce_(on_gpu([1.0])), lambda: hvd.broadcast_parameters({"w": on_gpu([1.0])}, 0)):
    try:
        action()
    except ValueError as error:
        assert "There is no NCCL on this host" in str(error), error
    else:
        raise AssertionError("it was taken")
assert hvd.cuda_built() and hvd.nccl_built() == 0
""",
    )
