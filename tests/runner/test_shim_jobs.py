"""A shim and the agent that has started it, in this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from resources import SETTLE_SECONDS, eventually

from horovod.worker.agent.log import LogReader
from horovod.worker.agent.shim import OVER, Order, rank_folder
from horovod.worker.agent.shim_job import ShimJob
from horovod.worker.agent.supervisor import Slot


async def until(condition: Callable[[], bool]) -> None:
    """Polls, while the event loop runs, what has no event."""
    give_up_at = asyncio.get_running_loop().time() + SETTLE_SECONDS
    while not condition():
        assert asyncio.get_running_loop().time() < give_up_at
        await asyncio.sleep(0.01)


def test_a_job_that_is_over_before_its_agent_has_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shim has left, and nobody listens any more; how it ended is in the folder."""
    connect = ShimJob._connect

    async def late(shim_job: ShimJob) -> None:
        assert eventually((shim_job.folder / OVER).exists)
        while True:  # until the shim, which has written that, has closed its socket
            await connect(shim_job)
            assert shim_job._reading is not None
            await shim_job._reading

    monkeypatch.setattr(ShimJob, "_connect", late)

    before = set(psutil.Process().children())

    async def run() -> ShimJob:
        slots = [Slot(0, ["sh", "-c", "exit 3"], dict(os.environ))]
        order = Order([slots], held=False, log_limit_bytes=1 << 20, orphan_grace_s=60.0)
        shim_job = await ShimJob.start("j", tmp_path, order, lambda shim_job: None)
        await until(lambda: not set(psutil.Process().children()) - before)  # the event loop is to see the shim's end
        return shim_job

    shim_job = asyncio.run(run())
    report = shim_job.report()
    assert report.over
    assert [(one.rank, one.ended, one.code) for one in report.ranks] == [(0, True, 3)]


def test_the_last_output_waits_for_its_reader_when_the_rank_has_ended(tmp_path: Path) -> None:
    """The log is full and held, so the last piece is in the shim's memory alone."""
    size = 32 << 16
    before = set(psutil.Process().children())

    async def run() -> int:
        slots = [Slot(0, ["dd", "if=/dev/zero", "bs=64k", "count=32", "status=none"], dict(os.environ))]
        order = Order([slots], held=True, log_limit_bytes=2 << 20, orphan_grace_s=60.0)
        shim_job = await ShimJob.start("j", tmp_path, order, lambda shim_job: None)
        await until(lambda: any(one.ended for one in shim_job.report().ranks))  # by then the log is full
        reader, position, found = LogReader(rank_folder(shim_job.folder, 0)), 0, 0
        while True:
            growth, is_over = shim_job.growth, shim_job.over.is_set()
            records, skipped = reader.read(position, shim_job.ends.get(0, 0), 1)  # one record
            assert skipped == 0
            if records:
                found += sum(len(record.data) for record in records)
                position = records[-1].position
                shim_job.taken({0: position})
                await asyncio.sleep(0.01)  # the shim acts on each of these, not on all of them at once
            elif is_over:
                break
            else:
                await asyncio.wait_for(growth.wait(), SETTLE_SECONDS)
        await until(lambda: not set(psutil.Process().children()) - before)  # the event loop is to see the shim's end
        return found

    assert asyncio.run(run()) == size


def test_a_reader_that_comes_back_holds_the_output_again(tmp_path: Path) -> None:
    """And when it goes for good, the rank writes on: it must not wait for a reader that nobody expects."""
    before = set(psutil.Process().children())

    async def run() -> None:
        slots = [Slot(0, ["dd", "if=/dev/zero", "bs=64k", "count=96", "status=none"], dict(os.environ))]
        order = Order([slots], held=True, log_limit_bytes=2 << 20, orphan_grace_s=60.0)
        shim_job = await ShimJob.start("j", tmp_path, order, lambda shim_job: None)
        shim_job.left_by_reader(for_good=True)
        await until(lambda: not shim_job.held)
        shim_job.held_by_reader({0: 0})
        shim_job.taken({0: 0})
        assert shim_job.held
        shim_job.left_by_reader(for_good=True)
        await asyncio.wait_for(shim_job.over.wait(), SETTLE_SECONDS)
        await until(lambda: not set(psutil.Process().children()) - before)

    asyncio.run(run())
