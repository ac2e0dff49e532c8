"""Ranks tell the coordinator what they have done, and its metrics and its page show it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from runtime_harness import allreduce, allreduce_all, world

from horovod.coordinator.server import EmbeddedCoordinator

LATE_S = 0.3
DEADLINE_S = 60.0


@pytest.fixture
def coordinator() -> Iterator[EmbeddedCoordinator]:
    with EmbeddedCoordinator() as coordinator:
        yield coordinator


def reports_of(coordinator: EmbeddedCoordinator) -> dict[int, tuple[int, int, int]]:
    assert coordinator.server is not None
    return {
        rank: (report.operations, report.bytes, report.waited_us)
        for job in coordinator.server.overview()
        for rank, report in job.reports.items()
    }


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_waits_and_who_is_late(coordinator: EmbeddedCoordinator, transport: str) -> None:
    with world(coordinator.address, 2, transport=transport, report_seconds=0.05) as contexts:
        allreduce_all(contexts, "a")  # negotiated
        before = [context.counters()["waited_us"] for context in contexts]
        waits = threading.Thread(target=allreduce, args=(contexts[0], "a"))
        waits.start()
        while contexts[0].engine.pending(0) == 0:
            time.sleep(0)
        threading.Event().wait(LATE_S)  # the lateness that is measured, not a wait for something
        allreduce(contexts[1], "a")
        waits.join()
        after = [context.counters() for context in contexts]
        waited_us = [after[rank]["waited_us"] - before[rank] for rank in range(2)]
        assert waited_us[0] > waited_us[1]
        expected = {rank: (2, 8, after[rank]["waited_us"]) for rank in range(2)}
        limit = time.monotonic() + DEADLINE_S
        while (found := reports_of(coordinator)) != expected and time.monotonic() < limit:
            time.sleep(0.01)  # until the next reports
        assert found == expected
    assert reports_of(coordinator) == {}


def test_no_reports_where_none_are_asked_for(coordinator: EmbeddedCoordinator) -> None:
    with world(coordinator.address, 2, report_seconds=0) as contexts:
        allreduce_all(contexts, "a")
        # Hello and announcement: one message where the operation is there before the stream is open, else two.
        assert all(context.counters()["messages_sent"] in (1, 2) for context in contexts)
        assert reports_of(coordinator) == {}
