"""A hundred thousand names, each used once: memory stays flat once the ids have been through."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np
import pytest

from horovod._core import OpSpec

sys.path.insert(0, str(Path(__file__).parents[2] / "engine"))
from recalling import RecallingWorld
from world import Member

NAMES = 100_000


@pytest.mark.timeout(600)
def test_memory_stays_flat() -> None:
    held: list[int] = []
    array = np.ones(1, np.float32)

    def body(member: Member) -> None:
        mine = array.copy()
        for first in range(0, NAMES, 1000):
            names = [f"allreduce.{'x' * 200}.{first + number}" for number in range(1000)]
            handles = [member.engine.submit(OpSpec(0), name, [_tensor(mine)]) for name in names]
            for handle in handles:
                handle.result()
            if member.rank == 0 and first in (40_000, NAMES - 1000):
                held.append(_resident_bytes())

    with RecallingWorld(2, "in_process") as world:
        world.run(body, timeout=500)
        assert all(engine.known() < 1 << 14 for engine in world.engines)
    # Two engines would keep more than 60 MB for the names between the two measurements.
    assert held[1] - held[0] < 20 << 20, held


def _tensor(array: np.ndarray) -> tuple[int, int, int, tuple[int, ...]]:
    return array.ctypes.data, array.ctypes.data, 7, array.shape


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
