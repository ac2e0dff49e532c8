"""The engine's copier by itself, as benchmarks/packing.py times it."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from error_codes import ends_with
from gpu_world import DeviceArray, Gpu, StandIns, read
from resources import eventually

from horovod import _core
from horovod.base.errors import EngineCode, code_of

SIZES = (1, 16, 1000, 0, 70_000)


def copier(libraries: StandIns, ordinal: int = 0, one_kernel: bool = True, nvrtc_file: str = "") -> _core.Copier:
    files = {"cuda_file": libraries.cuda_file, "nvrtc_file": nvrtc_file or libraries.nvrtc_file}
    return _core.Copier(ordinal=ordinal, one_kernel=one_kernel, **files)


def copy(made: _core.Copier, gpu: Gpu, times: int = 1) -> None:
    """Copies of all sizes, which must arrive."""
    sources = [gpu.array(np.arange(size, dtype=np.int64).astype(np.uint8)) for size in SIZES]
    targets = [gpu.array(np.zeros(size, np.uint8)) for size in SIZES]
    gpu.synchronize()
    made.copy([(a.address, b.address, size) for a, b, size in zip(sources, targets, SIZES, strict=True)], times)
    for one, other in zip(sources, targets, strict=True):
        np.testing.assert_array_equal(other.numpy(made.stream), one.numpy())


def test_one_launch_or_one_copy_each(libraries: StandIns) -> None:
    gpu = Gpu(libraries, 1)
    for one_kernel, launches, copies in ((True, 3, 0), (False, 0, 3 * (len(SIZES) - 1))):
        before = [libraries.count(what) for what in ("launches", "copies")]
        made = copier(libraries, 1, one_kernel)
        copy(made, gpu, times=3)
        assert made.obstacle == ""
        found = [libraries.count(what) - was for what, was in zip(("launches", "copies"), before, strict=True)]
        assert found == [launches, copies]


def test_without_a_compiler_it_says_why(libraries: StandIns) -> None:
    made = copier(libraries, nvrtc_file="/nowhere/libnvrtc.so.12")
    copy(made, Gpu(libraries, 0))
    assert "GPU 0" in made.obstacle
    assert "/nowhere/libnvrtc.so.12" in made.obstacle
    assert code_of(made.obstacle) is None, "it is no error"


def test_what_can_not_be_had_is_told(libraries: StandIns) -> None:
    with pytest.raises(ValueError, match=ends_with(EngineCode.NO_GPU, "GPU 77")):
        copier(libraries, 77)
    with pytest.raises(ValueError, match=ends_with(EngineCode.NO_GPU, "/nowhere/libcuda.so.1")):
        _core.Copier(ordinal=0, one_kernel=True, cuda_file="/nowhere/libcuda.so.1", nvrtc_file="")


def test_nothing_is_left(libraries: StandIns) -> None:
    gpu = Gpu(libraries, 0)

    def cycle(_: bool) -> None:
        copy(copier(libraries), gpu)

    libraries.check_nothing_is_left(cycle)


def test_a_kernel_that_may_still_run_stays_loaded(libraries: StandIns) -> None:
    """The stand-in ends the process that unloads it."""
    gpu = Gpu(libraries, 0)
    made = copier(libraries)
    arrays = [DeviceArray(gpu, np.full(100, value, np.uint8)) for value in (3, 0, 7)]
    gpu.synchronize()
    made.copy([(arrays[0].address, arrays[1].address, 100)])
    gpu.synchronize(made.stream)
    held = gpu.hold(made.stream)
    made.copy([(arrays[2].address, arrays[1].address, 100)])
    before = libraries.count("modules")
    del made
    gc.collect()
    gpu.release(held)
    assert libraries.count("modules") == before
    # The copier's stream has gone with it, so what the kernel writes is all that tells when it has run. The arrays must
    # live until then: the stand-in ends a process whose kernel finds its memory freed.
    assert eventually(lambda: bool(np.all(read(arrays[1].address, arrays[1].dtype, arrays[1].shape) == 7)))
