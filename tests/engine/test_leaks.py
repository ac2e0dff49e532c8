"""Flat over many worlds and steps, and in make test-all over thousands: descriptors, threads, mappings, memory.

HOROVOD_TEST_CYCLES and HOROVOD_TEST_STEPS set how many, for example for the full 10,000 worlds of every kind:
HOROVOD_TEST_CYCLES=10000 python -m pytest --timeout 3600 tests/engine/test_leaks.py
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import tiers
from processes import Processes
from resources import held, leaks
from world import SUM, EngineWorld, Member

from horovod import _core

CYCLES = int(os.environ.get("HOROVOD_TEST_CYCLES", "0"))
STEPS = int(os.environ.get("HOROVOD_TEST_STEPS", str(tiers.pick(20_000, 100_000))))
WARM_UP = tiers.pick(10, 50)
pytestmark = [pytest.mark.longer, pytest.mark.timeout(600 + CYCLES)]


def step(member: Member) -> None:
    np.testing.assert_array_equal(member.allreduce(np.ones(4, np.float32), op=SUM), member.size)
    member.barrier()


def test_worlds_of_one() -> None:
    array = np.ones(4, np.float32)
    tensor = (array.ctypes.data, array.ctypes.data, 7, array.shape)

    def cycle() -> None:
        engine = _core.Engine(rank=0, size=1, epoch=1, labels=["rank 0 on host here"])
        engine.submit(_core.OpSpec(0), "allreduce.x", [tensor]).result()
        engine.close()

    for _ in range(WARM_UP):
        cycle()
    before = held()
    for _ in range(CYCLES or tiers.pick(2_000, 10_000)):
        cycle()
    assert not leaks(before)


@pytest.mark.parametrize("transport", ["in_process", "shm", "tcp", "hosts"])
def test_pairs(transport: str) -> None:
    def cycle() -> None:
        with EngineWorld(3 if transport == "hosts" else 2, transport) as world:
            world.run(step)

    for _ in range(WARM_UP):
        cycle()
    before = held()
    for _ in range(CYCLES or tiers.pick(100, 600)):
        cycle()
    assert not leaks(before)


@pytest.mark.parametrize("transport", ["in_process", "shm", "tcp", "hosts"])
def test_pairs_that_end_badly(transport: str) -> None:
    """Aborted in the middle, with operations that will never complete."""

    def cycle() -> None:
        with EngineWorld(3 if transport == "hosts" else 2, transport) as world:
            world.run(step)
            handle = world.members[0].allreduce_async(np.ones(300_000, np.float32), "allreduce.never")
            world.engines[1].abort("rank 1 on host here gave up.")
            with pytest.raises(RuntimeError, match="gave up"):
                world.members[0].wait(handle)

    for _ in range(WARM_UP):
        cycle()
    before = held()
    for _ in range((CYCLES or tiers.pick(100, 600)) // 10):
        cycle()
    assert not leaks(before)


@pytest.mark.timeout(900)  # processes that share a processor with strangers take a hundred times as long
@pytest.mark.parametrize("transport", ["shm", "tcp", "hosts"])
def test_steps(transport: str) -> None:
    """Two processes and small operations; for two hosts three, and operations that are large enough to use both."""
    steps, elements = (STEPS // 10, 30_000) if transport == "hosts" else (STEPS, 16)
    with Processes() as processes:
        ranks = processes.start(3 if transport == "hosts" else 2)
        processes.form(ranks, transport)
        for rank in ranks:
            rank.tell("measure", warm_up=steps // 10, steps=steps, elements=elements)
        for rank in ranks:
            assert rank.answer("leaked", "error") == {}
        processes.close(ranks)
