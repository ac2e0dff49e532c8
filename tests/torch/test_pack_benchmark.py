"""benchmarks/packing.py: what it times is the engine's copier, here on the stand-in for the driver."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_worlds import NO_DEVICE, standin_world
from native_builds import gpu_libraries

from benchmarks import packing

OURS = {f"{way}{how}" for way in ("pack", "unpack") for how in ("", " one by one")}
TORCHS = {"pack foreach", "unpack foreach", "copy"}


def on_standin(sizes: list[int], broken: bool) -> dict[str, Any]:
    import ctypes

    import fake_gpu
    import torch

    from horovod import _core
    from horovod.worker.runtime.devices import cuda_file, nvrtc_file

    files = {"cuda_file": cuda_file(), "nvrtc_file": nvrtc_file()}
    copiers: dict[str, Any] = {
        name: _core.Copier(ordinal=0, one_kernel=name == "kernel", **files) for name in ("kernel", "one by one")
    }

    class WithoutTheLast:
        obstacle = ""

        def copy(self, copies: list[tuple[int, int, int]], times: int = 1) -> None:
            copiers["one by one"].copy(copies[:-1], times)

    def finish() -> None:
        fake_gpu.synchronize()
        for copier in copiers.values():
            fake_gpu.cuda.cuStreamSynchronize(ctypes.c_void_p(copier.stream))

    taken = {"kernel": WithoutTheLast(), "one by one": copiers["one by one"]} if broken else copiers
    found = packing.measure(sizes, taken, packing.HostClock(finish), torch.device("cuda", 0), fake_gpu.on_gpu)
    return found | {"launches": fake_gpu.count("launches"), "copies": fake_gpu.count("copies")}


def run(sizes: list[int], broken: bool = False) -> dict[str, Any]:
    nvrtc = gpu_libraries()[0].with_name("libstandin_nvrtc.so")
    with standin_world(1, HOROVOD_NVRTC_LIBRARY=str(nvrtc)) as keeper:
        found: dict[str, Any] = keeper.get().run(on_standin, sizes, broken)[0]
    return found


def test_every_way_is_timed_and_checked() -> None:
    sizes = [4, 20, 4096, 70_000]
    found = run(sizes)
    assert (found["tensors"], found["bytes"], found["obstacle"]) == (4, sum(sizes), "")
    for figures in ("seconds", "host_seconds", "bytes_per_second", "of_copy"):
        assert set(found[figures]) == OURS | TORCHS
        assert all(figure > 0 for figure in found[figures].values())
    assert found["of_copy"]["copy"] == 1
    calls = 1 + packing._ROUNDS * packing._TIMES
    assert (found["launches"], found["copies"]) == (2 * calls, 2 * calls * len(sizes))


def test_wrong_values_are_no_figure() -> None:
    with pytest.raises(AssertionError, match=r"WrongValuesError: after 'pack', its place in the buffer 1 of 2 elem"):
        run([4, 8], broken=True)


def test_the_host_gets_ahead_of_what_the_device_times(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    done: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def elapsed_time(self, end: Event) -> float:
            assert end is not self
            return 6.0  # milliseconds

    class Current:
        def __init__(self, stream: object) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            done.append(self._stream)

        def __exit__(self, *_: object) -> None:
            done.append("left")

    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: (stream, device.index))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", Current)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("synchronize"))
    clock = packing.DeviceClock(torch.device("cuda", 1), 77)
    seconds, host = clock.time(done.append, 3)
    assert seconds == pytest.approx(0.002)
    assert 0 < host < 1
    assert done == ["synchronize", (77, 1), "sleep", "event", 3, "event", "left", "synchronize"]


def test_the_line_fits_the_header() -> None:
    found = {
        "tensors": 161,
        "bytes": 102_228_128,
        "seconds": {"copy": 1e-4, "pack": 1.25e-4, "unpack": 2e-4, "pack foreach": 4e-4, "pack one by one": 1e-3},
        "host_seconds": {"pack": 1e-5, "pack one by one": 9e-4},
        "bytes_per_second": {"copy": 1.02e12, "pack": 8.2e11},
        "of_copy": {"pack": 0.8, "unpack": 0.5, "pack foreach": 0.25},
    }
    shown = packing.line("resnet50", found)
    assert len(shown) == len(packing.HEADER)
    wanted = "resnet50 161 tensors, 97.49 MB 1020.00 125 us 820.00 80% 10 us 200 us 50% 400 us 25% 1 ms 900 us"
    assert " ".join(shown.split()) == wanted


def test_on_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip(NO_DEVICE)
    from horovod.worker.runtime.devices import cuda_file, nvrtc_file

    files = {"cuda_file": cuda_file(), "nvrtc_file": nvrtc_file()}
    for sizes in packing.sets(tiny=True).values():
        found = packing.figures(torch.device("cuda", 0), files, sizes)
        assert set(found["seconds"]) == OURS | TORCHS
        assert found["obstacle"] == ""
