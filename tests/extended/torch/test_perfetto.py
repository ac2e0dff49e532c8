"""Perfetto shows the timeline as it is meant: its own parser has no complaint and finds every span where it belongs."""

from __future__ import annotations

from pathlib import Path

import pytest
import traces
from trace_processor import trace_processor
from worlds import World

TENSORS = ("allreduce.small", "allreduce.large", "allgather.rows", "broadcast.weights", "barrier.noname")
STEPS = 50  # so many that events of the same microsecond are among them


def _train(path: str) -> None:
    import torch

    import horovod.torch as hvd

    hvd.start_timeline(path, mark_cycles=True)
    for _ in range(STEPS):
        handle = hvd.allreduce_async(torch.ones(300_000), name="large")
        hvd.allreduce(torch.ones(1), name="small")
        hvd.synchronize(handle)
        hvd.allgather(torch.ones(2, 3), name="rows")
        hvd.broadcast(torch.ones(5), 1, name="weights")
        hvd.barrier()
    hvd.stop_timeline()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_it_opens_in_perfetto(transport: str, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with World(2, transport, {"HOROVOD_TIMELINE": "DYNAMIC"}) as world:
        world.run(_train, str(path))
    found = traces.read(path)
    with trace_processor(path.read_bytes()) as perfetto:
        assert perfetto.query("select name, value from stats where severity != 'info' and value > 0") == []
        rows = perfetto.query(
            "select process.name, slice.name, slice.depth, slice.dur, slice.arg_set_id from slice "
            "join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid) "
            "where slice.dur != 0 or slice.name glob '*[^0-9]*' order by slice.ts"
        )
        assert {row[0] for row in rows} == set(TENSORS)
        assert all(duration >= 0 for _, _, _, duration, _ in rows), "every span has its end"
        for tensor in TENSORS:
            spans = found.spans[tensor]
            top = [(name, arguments) for owner, name, depth, _, arguments in rows if (owner, depth) == (tensor, 0)]
            assert [name for name, _ in top] == [span.name for span in spans]
            inside = [name for owner, name, depth, _, _ in rows if owner == tensor and depth == 1]
            assert sorted(inside) == sorted(activity for span in spans for activity in span.activities)
        shapes = perfetto.query(
            "select distinct string_value from args join slice using (arg_set_id) where key = 'args.shape' "
            "and slice.name = 'BROADCAST'"
        )
        assert shapes == [("[5]",)]
        ticks = perfetto.query("select name, count() from slice where name in ('0', '1') group by name order by name")
        assert ticks == ([("0", STEPS * len(TENSORS)), ("1", STEPS * len(TENSORS))] if transport == "tcp" else [])
        assert perfetto.query("select count() > 0 from slice where name = 'CYCLE_START'") == [(1,)]
