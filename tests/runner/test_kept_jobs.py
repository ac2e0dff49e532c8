"""A keeper and the agent that has started it, in this process."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest
from resources import eventually

from horovod.worker.agent.agent import Slot
from horovod.worker.agent.keeper import OVER, Order
from horovod.worker.agent.kept import KeptJob


def test_a_job_that_is_over_before_its_agent_has_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keeper has left, and nobody listens any more; how it ended is in the folder."""
    connect = KeptJob._connect

    async def late(kept: KeptJob) -> None:
        assert eventually((kept.folder / OVER).exists)
        while True:  # until the keeper, which has written that, has closed its socket
            await connect(kept)
            assert kept._reading is not None
            await kept._reading

    monkeypatch.setattr(KeptJob, "_connect", late)

    before = set(psutil.Process().children())

    async def run() -> KeptJob:
        slots = [Slot(0, ["sh", "-c", "exit 3"], dict(os.environ))]
        order = Order(slots, held=False, log_limit_bytes=1 << 20, orphan_grace_s=60.0)
        kept = await KeptJob.start("j", tmp_path, order, lambda kept: None)
        while set(psutil.Process().children()) - before:  # the event loop is to see the keeper's end
            await asyncio.sleep(0.01)
        return kept

    kept = asyncio.run(run())
    report = kept.report()
    assert report.over
    assert [(one.rank, one.ended, one.code) for one in report.ranks] == [(0, True, 3)]
