"""How horovod.torch hands tensors on a GPU to the engine and takes results back.

PyTorch for CPUs has no such tensors; fake_gpu.py says what is in their place. Here it is a world of one, whose
operations are real calls of NCCL all the same. For two ranks see test_gpu_training.py, for the engine
tests/engine/test_gpu_*.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from native_builds import ROOT, gpu_libraries


@pytest.fixture(scope="module")
def files() -> list[str]:
    return [str(file) for file in gpu_libraries()]


PRELUDE = """
import gc, re, sys
import fake_gpu
import torch
from error_codes import ends_with
from fake_gpu import on_gpu
import horovod.torch as hvd
from horovod.base.errors import OperationCode

fake_gpu.install(sys.argv[1:], 0)
hvd.init()
"""


def run(files: list[str], script: str, **environment: str) -> None:
    given = {"HOROVOD_CUDA_LIBRARY": files[0], "HOROVOD_NCCL_LIBRARY": files[1], **environment}
    given["PYTHONPATH"] = os.pathsep.join(str(folder) for folder in (ROOT / "tests", ROOT / "tests" / "torch"))
    command = [sys.executable, "-c", PRELUDE + script, *files]
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_in_place(files: list[str]) -> None:
    run(
        files,
        """
x = on_gpu([1.0, 2.0, 3.0])
assert hvd.allreduce_(x, op=hvd.Sum, postscale_factor=2.0) is x
assert x.cpu().tolist() == [2.0, 4.0, 6.0]
hvd.broadcast_(x, 0)
group = [on_gpu([1.0]), on_gpu([2])]
hvd.grouped_allreduce_(group, op=hvd.Max)
assert [one.cpu().tolist() for one in group] == [[1.0], [2]]
""",
    )


def test_received_splits_are_where_the_splits_are(files: list[str]) -> None:
    run(
        files,
        """
values, splits = on_gpu([1.0, 2.0]), on_gpu([2], torch.int32)
for _, counts in (
    hvd.alltoall(values, splits=splits),
    hvd.synchronize(hvd.alltoall_async(values, splits=splits)),
    hvd.alltoall(on_gpu([[1.0], [2.0]]).requires_grad_(), splits=splits),
):
    assert counts.is_cuda and counts.dtype == torch.int32 and counts.cpu().tolist() == [2]
assert hvd.alltoall(values, splits=[2])[1].device.type == "cpu"
""",
    )


def test_a_handle_lets_the_stream_wait_that_is_current_then(files: list[str]) -> None:
    run(
        files,
        """
x = on_gpu([1.0, 2.0])
fake_gpu.synchronize()
held = fake_gpu.hold()
handle = hvd.allreduce_async_(x, op=hvd.Sum, prescale_factor=3.0)
fake_gpu.stream = fake_gpu.new_stream()
assert hvd.synchronize(handle) is x  # though the first stream stands still
assert x.memory.tolist() == [1.0, 2.0]
fake_gpu.release(held)
assert x.cpu().tolist() == [3.0, 6.0]
""",
    )


def test_results_of_the_engine_are_adopted_and_given_back(files: list[str]) -> None:
    run(
        files,
        """
x = on_gpu([[1, 2], [3, 4]])
values = on_gpu([1.0, 2.0])
before = fake_gpu.count("blocks")
gathered = hvd.allgather(x)
address = gathered.data_ptr()
parts = hvd.synchronize(hvd.grouped_reducescatter_async([values, values], op=hvd.Sum))
received, splits = hvd.alltoall(values, splits=[2])
assert gathered.cpu().tolist() == [[1, 2], [3, 4]]
assert gathered.is_cuda and gathered.dtype == torch.int64 and address != x.data_ptr()
assert [part.cpu().tolist() for part in parts] == [[1.0, 2.0], [1.0, 2.0]]
assert (received.cpu().tolist(), splits.tolist()) == ([1.0, 2.0], [2])
assert fake_gpu.count("blocks") == before + 4  # no copies
del gathered, parts, received
for _ in range(10_000):  # each operation looks at what the device has done since
    hvd.allreduce_(values)
    fake_gpu.synchronize()
    if fake_gpu.count("blocks") <= before:
        break
else:
    raise AssertionError("the results were not given back")
""",
    )


def test_what_is_missing_is_told(files: list[str]) -> None:
    """Both when an optimizer is made and when a tensor comes; where NCCL is demanded."""
    run(
        files,
        """
for action in (lambda: hvd.allreduce_(on_gpu([1.0])), lambda: hvd.broadcast_parameters({"w": on_gpu([1.0])}, 0)):
    try:
        action()
    except ValueError as error:
        assert str(error).endswith(("[no-nccl]", "[unsupported-device]")), error  # of the engine, of the framework
        assert "/nowhere/libnccl.so.2" in str(error), error
    else:
        raise AssertionError("it was taken")
assert hvd.cuda_built() and hvd.nccl_built() == 0
""",
        HOROVOD_GPU_OPERATIONS="NCCL",
        HOROVOD_NCCL_LIBRARY="/nowhere/libnccl.so.2",
    )


def test_without_nccl(files: list[str]) -> None:
    run(
        files,
        """
x = on_gpu([1.0, 2.0, 3.0])
assert hvd.allreduce_(x, op=hvd.Sum, postscale_factor=2.0) is x
assert x.cpu().tolist() == [2.0, 4.0, 6.0]
assert hvd.allreduce_(x, op=hvd.Adasum).cpu().tolist() == [2.0, 4.0, 6.0]
hvd.broadcast_parameters({"w": x}, 0)
assert fake_gpu.cuda.standin_cuda_count(b"pinned") > 0
hvd.shutdown()
assert fake_gpu.cuda.standin_cuda_count(b"pinned") == 0
""",
        HOROVOD_NCCL_LIBRARY="/nowhere/libnccl.so.2",
    )


def test_eight_bit_floats(files: list[str]) -> None:
    """NCCL reduces them, but does not multiply them on one rank, as was seen on an H100: the host does."""
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        run(
            files,
            f"""
x = on_gpu([1.0, 2.0, -0.5], torch.{dtype})
for op in (hvd.Sum, hvd.Average):
    assert hvd.allreduce_(x, op=op) is x
    assert x.cpu().float().tolist() == [1.0, 2.0, -0.5]
assert fake_gpu.cuda.standin_cuda_count(b"pinned") == 0
assert hvd.allreduce_(x, op=hvd.Sum, postscale_factor=2.0) is x
assert x.cpu().float().tolist() == [2.0, 4.0, -1.0]
assert fake_gpu.cuda.standin_cuda_count(b"pinned") > 0
""",
        )


def test_complex_numbers_travel(files: list[str]) -> None:
    """As on the CPU (test_views.py)."""
    run(
        files,
        """
values = [1 + 2j, 3 - 4j]
groups = fake_gpu.count("groups")
for name in ("allreduce", "allreduce_", "allgather", "alltoall", "reducescatter", "broadcast", "broadcast_"):
    x = on_gpu(torch.tensor(values))
    result = getattr(hvd, name)(x, name=name, **({"root_rank": 0} if "broadcast" in name else {}))
    assert result.is_cuda and result.dtype == torch.complex64 and result.cpu().tolist() == values, name
    assert (result is x) == name.endswith("_"), name
for name in ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter"):
    real, result = getattr(hvd, name)([on_gpu([1.0]), on_gpu(torch.tensor(values))], name=name)
    assert real.cpu().tolist() == [1.0] and result.is_cuda and result.cpu().tolist() == values, name
assert fake_gpu.count("groups") == groups + 10  # none went through the host's memory
x = on_gpu(torch.tensor(values))
assert hvd.allreduce_(x, op=hvd.Sum, postscale_factor=2.0) is x and x.cpu().tolist() == [2 + 4j, 6 - 8j]
try:
    hvd.allreduce(x, op=hvd.Max, name="counts")
except ValueError as error:
    assert re.search(ends_with(OperationCode.UNDEFINED_REDUCTION, "hvd.Max", "complex"), str(error)), error
else:
    raise AssertionError("it was taken")
""",
    )


def test_unsigned_integers_are_taken(files: list[str]) -> None:
    """Of values that are negative when they are taken for signed ones."""
    run(
        files,
        """
for bits in (16, 32, 64):
    unsigned, signed = getattr(torch, f"uint{bits}"), getattr(torch, f"int{bits}")
    x = on_gpu(torch.tensor([-2, 3], dtype=signed).view(unsigned))
    for op in (hvd.Sum, hvd.Average, hvd.Max):
        assert hvd.allreduce(x, op=op).cpu().tolist() == [2**bits - 2, 3]
    assert hvd.allgather(x).cpu().tolist() == [2**bits - 2, 3]
""",
    )
