"""The engine's kernel that packs small tensors, by itself: how near it comes to what the device copies at all.

Tensors of a set are copied into one buffer and out of it, laid out as the engine lays them out, and each way is timed
on the device: the host gets ahead first, so that a figure has none of its time. Where no GPU is, the ways of PyTorch
remain, on the CPU: they show that it works.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from benchmarks.cases import FLOAT_BYTES, KIB, MIB, resnet50_shapes, size_text, transformer350m_shapes
from benchmarks.report import rate_text, time_text
from benchmarks.values import WrongValuesError

_ALIGNMENT = 16  # of a tensor in the buffer, see csrc/backends/nccl/packing.h
_SMALL = 64 * KIB  # HOROVOD_GPU_PACK_THRESHOLD as it is by default
_AHEAD_CYCLES = 20_000_000  # about 10 ms, in which the host queues what is timed
_ROUNDS, _TIMES, _MOST_COPIES = 5, 20, 500  # the driver's queue is finite: more than that, and the host waits for it

Way = Callable[[int], None]  # queues what it does as often as it is told


class Copier(Protocol):
    """horovod._core.Copier."""

    @property
    def stream(self) -> int: ...
    @property
    def obstacle(self) -> str: ...
    def copy(self, copies: Sequence[tuple[int, int, int]], times: int = 1) -> None: ...


class Clock(Protocol):
    def time(self, way: Way, times: int) -> tuple[float, float]:
        """Seconds of the device and of the host for one."""


class DeviceClock:
    """Times what is queued on one stream by the device's own clock; torch's work goes there too meanwhile."""

    def __init__(self, device: torch.device, stream: int) -> None:
        self._device = device
        self._stream = torch.cuda.ExternalStream(stream, device)

    def time(self, way: Way, times: int) -> tuple[float, float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(_AHEAD_CYCLES)
            begin.record()
            started = time.perf_counter()
            way(times)
            host = time.perf_counter() - started
            end.record()
        torch.cuda.synchronize(self._device)
        return begin.elapsed_time(end) * 1e-3 / times, host / times


class HostClock:
    """Where there is nothing but the host."""

    def __init__(self, finish: Callable[[], None] = lambda: None) -> None:
        self._finish = finish

    def time(self, way: Way, times: int) -> tuple[float, float]:
        self._finish()
        started = time.perf_counter()
        way(times)
        host = time.perf_counter() - started
        self._finish()
        return (time.perf_counter() - started) / times, host / times


def sets(tiny: bool = False) -> dict[str, list[int]]:
    """Bytes of each tensor, by the name of the set."""
    if tiny:
        return {"3 x 1 KB": [KIB] * 3, "uneven": [4, 20, 4096]}
    found = {}
    for name, shapes in (("resnet50", resnet50_shapes()), ("transformer350m", transformer350m_shapes())):
        found[name] = [math.prod(shape) * FLOAT_BYTES for shape in shapes]
        found[f"{name}, small ones"] = [size for size in found[name] if size <= _SMALL]
    for count, size in ((256, KIB), (256, 64 * KIB), (64, MIB)):
        found[f"{count} x {size_text(size)}"] = [size] * count
    return found


def figures(device: torch.device, files: Mapping[str, str], sizes: Sequence[int]) -> dict[str, Any]:
    """What this device does with tensors of so many bytes. files: cuda_file and nvrtc_file for the engine's copier.

    Raises:
        WrongValuesError: what was copied differs from what should have been.
    """
    if device.type != "cuda":
        return measure(sizes, {}, HostClock(), device)
    from horovod import _core

    ordinal = device.index or 0
    kernel = _core.Copier(ordinal=ordinal, one_kernel=True, **files)
    copiers = {"kernel": kernel, "one by one": _core.Copier(ordinal=ordinal, one_kernel=False, **files)}
    clocks = {name: DeviceClock(device, copier.stream) for name, copier in copiers.items()}
    found = measure(sizes, copiers, clocks["kernel"], device, clocks=clocks)
    torch.cuda.empty_cache()
    return found


def measure(
    sizes: Sequence[int],
    copiers: Mapping[str, Copier],
    clock: Clock,
    device: torch.device,
    to_device: Callable[[torch.Tensor], torch.Tensor] | None = None,
    clocks: Mapping[str, Clock] | None = None,
) -> dict[str, Any]:
    """Seconds of each way, taking turns, and what the engine's have of the device's own copy of as many bytes.

    copiers: "kernel" and "one by one", or none; clocks: theirs, where a clock is of one stream.
    """
    put = to_device or (lambda made: made.to(device))
    tensors = [put(_numbers(size // FLOAT_BYTES, index)) for index, size in enumerate(sizes)]
    wanted = [one.clone() for one in tensors]
    starts, end = [], 0
    for size in sizes:
        starts.append(end // FLOAT_BYTES)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    buffer, other = (put(torch.zeros(end // FLOAT_BYTES)) for _ in range(2))
    views = [buffer[start : start + one.numel()] for start, one in zip(starts, tensors, strict=True)]
    there = [(one.data_ptr(), view.data_ptr(), one.nbytes) for one, view in zip(tensors, views, strict=True)]
    back = [(to, at, size) for at, to, size in there]
    whole, elements = sum(sizes), sum(sizes) // FLOAT_BYTES
    ways: dict[str, Way] = {}
    for name, copier in copiers.items():
        pack, unpack = ("pack", "unpack") if name == "kernel" else (f"pack {name}", f"unpack {name}")
        ways[pack] = lambda times, copier=copier: copier.copy(there, times)  # type: ignore[misc]
        ways[unpack] = lambda times, copier=copier: copier.copy(back, times)  # type: ignore[misc]
    ways["pack foreach"] = lambda times: _repeat(times, lambda: torch._foreach_copy_(views, tensors))
    ways["unpack foreach"] = lambda times: _repeat(times, lambda: torch._foreach_copy_(tensors, views))
    ways["copy"] = lambda times: _repeat(times, lambda: other[:elements].copy_(buffer[:elements]))

    def clock_of(way: str) -> Clock:
        return (clocks or {}).get("one by one" if way.endswith("one by one") else "kernel", clock)

    def times_of(way: str) -> int:
        return max(1, min(_TIMES, _MOST_COPIES // len(sizes))) if way.endswith("one by one") else _TIMES

    for way, run in ways.items():  # warms up, and every value is compared
        if way.startswith("unpack"):
            for one in tensors:
                one.zero_()
        elif way.startswith("pack"):
            buffer.zero_()
        clock_of(way).time(run, 1)
        _check(way, wanted, {"tensor": tensors, "its place in the buffer": views})
    if not torch.equal(other[:elements], buffer[:elements]):
        raise WrongValuesError("a copy of the buffer differs from it")
    rounds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(_ROUNDS):
        for way, run in ways.items():
            rounds[way].append(clock_of(way).time(run, times_of(way)))
    seconds = {way: statistics.median(device for device, _ in each) for way, each in rounds.items()}
    return {
        "tensors": len(sizes),
        "bytes": whole,
        "seconds": seconds,
        "host_seconds": {way: statistics.median(host for _, host in each) for way, each in rounds.items()},
        "bytes_per_second": {way: whole / each for way, each in seconds.items()},
        "of_copy": {way: seconds["copy"] / each for way, each in seconds.items()},
        "obstacle": copiers["kernel"].obstacle if copiers else "There is no GPU.",
    }


def _numbers(count: int, index: int) -> torch.Tensor:
    """Floats that tell tensors and positions apart; 8191 is a prime, so that a chunk in a wrong place shows."""
    return (torch.arange(count, dtype=torch.int32).add_(7 * index) % 8191 + 1).float()


def _check(way: str, wanted: Sequence[torch.Tensor], found: Mapping[str, Sequence[torch.Tensor]]) -> None:
    for what, each in found.items():
        for index, (one, right) in enumerate(zip(each, wanted, strict=True)):
            if not torch.equal(one, right):
                place = int((one.cpu() != right.cpu()).nonzero()[0])
                raise WrongValuesError(
                    f"after {way!r}, {what} {index} of {one.numel()} elements has {one.cpu()[place]:g} at {place}, "
                    f"not {right.cpu()[place]:g}"
                )


def _repeat(times: int, action: Callable[[], object]) -> None:
    for _ in range(times):
        action()


# -- the table ---------------------------------------------------------------------------------------------------------
_COLUMNS = (
    ("packing", 28), ("size", 24), ("copy GB/s", 11), ("pack", 10), ("GB/s", 9), ("of copy", 9), ("host", 9),
    ("unpack", 10), ("of copy", 9), ("foreach", 10), ("of copy", 9), ("one by one", 12), ("host", 9),
)  # fmt: skip
HEADER = "".join(f"{name:>{width}}" for name, width in _COLUMNS)


def line(name: str, found: Mapping[str, Any]) -> str:
    seconds, host, shares = found["seconds"], found["host_seconds"], found["of_copy"]

    def share(way: str) -> str:
        return f"{100 * shares[way]:.0f}%" if way in shares else "-"

    cells = [
        name,
        f"{found['tensors']} tensors, {size_text(found['bytes'])}",
        rate_text(found["bytes_per_second"]["copy"]),
        time_text(seconds.get("pack")),
        rate_text(found["bytes_per_second"].get("pack", 0.0)),
        share("pack"),
        time_text(host.get("pack")),
        time_text(seconds.get("unpack")),
        share("unpack"),
        time_text(seconds["pack foreach"]),
        share("pack foreach"),
        time_text(seconds.get("pack one by one")),
        time_text(host.get("pack one by one")),
    ]
    return "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
