"""The timeline of real worlds: what the file says of operations, and when it is there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import traces
from error_codes import ends_with
from worlds import World

from horovod.base.errors import EngineCode, OperationCode

EAGER = {"allreduce.small": True, 'allreduce.la"rge\\\n': False}
SETTINGS = {"HOROVOD_TIMELINE": "DYNAMIC", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


@pytest.fixture(scope="module", params=["shm", "tcp"])
def dynamic(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(2, request.param, SETTINGS) as world:
        yield world


# -- what it says ------------------------------------------------------------------------------------------------------
def _every_collective(path: str) -> None:
    import torch

    import horovod.torch as hvd

    hvd.start_timeline(path)
    for _ in range(3):
        hvd.allreduce(torch.ones(1), name="small")
        hvd.allreduce(torch.ones(300, 1000), name='la"rge\\\n')
    hvd.allgather(torch.ones(2, 3, dtype=torch.int64), name="gather")
    hvd.broadcast(torch.ones(300_000), 1, name="cast")
    hvd.alltoall(torch.ones(4, dtype=torch.uint8), name="all")
    hvd.reducescatter(torch.ones(4, 2), name="scatter", op=hvd.Sum)
    hvd.allreduce(torch.ones(5, dtype=torch.float64), name="ada", op=hvd.Adasum)
    hvd.grouped_allreduce([torch.ones(2), torch.ones(100_000)], name="group")
    hvd.barrier()
    hvd.stop_timeline()


def test_every_operation_has_its_spans(dynamic: World, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    dynamic.run(_every_collective, str(path))
    found = traces.read(path)
    plane = dynamic.transport.upper()
    expected = {  # name: operation, activity, dtype, shape, how often
        "allreduce.small": ("ALLREDUCE", "ALLREDUCE", "float32", "[1]", 3),
        'allreduce.la"rge\\\n': ("ALLREDUCE", "ALLREDUCE", "float32", "[300, 1000]", 3),
        "allgather.gather": ("ALLGATHER", "ALLGATHER", "int64", "[2, 3]", 1),
        "broadcast.cast": ("BROADCAST", "BCAST", "float32", "[300000]", 1),
        "alltoall.all": ("ALLTOALL", "ALLTOALL", "uint8", "[4]", 1),
        "reducescatter.scatter": ("REDUCESCATTER", "REDUCESCATTER", "float32", "[4, 2]", 1),
        "allreduce.ada": ("ADASUM", "ADASUM_ALLREDUCE", "float64", "[5]", 1),
        "grouped_allreduce.group": ("ALLREDUCE", "ALLREDUCE", "float32", "[2], [100000]", 1),
        "barrier.noname": ("BARRIER", "BARRIER", "", "", 1),
    }
    assert set(found.spans) == set(expected)
    for name, (op, activity, dtype, shape, count) in expected.items():
        spans = found.spans[name]
        assert [span.name for span in spans] == [f"NEGOTIATE_{op}", op] * count, name
        for negotiation, operation in zip(spans[::2], spans[1::2], strict=True):
            assert operation.start == negotiation.end
            assert operation.arguments == {"dtype": dtype, "shape": shape}
            (algorithm,) = [one for one in operation.activities if one != "QUEUE"]
            assert algorithm.replace("_EAGER", "") == f"{plane}_{activity}"
            if name in EAGER:
                assert ("_EAGER" in algorithm) == EAGER[name]
            # Shared memory counts arrivals and does not know whose they are.
            assert sorted(negotiation.ticks) == (["0", "1"] if plane == "TCP" else [])
    assert not found.instants("CYCLE_START")


def _many_unnamed(path: str) -> None:
    import torch

    import horovod.torch as hvd

    hvd.start_timeline(path, mark_cycles=True)
    for _ in range(20):
        for handle in [hvd.allreduce_async(torch.ones(10_000)) for _ in range(4)]:
            hvd.synchronize(handle)
    hvd.stop_timeline()


def test_operations_at_the_same_time_do_not_share_a_process(dynamic: World, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    dynamic.run(_many_unnamed, str(path))
    found = traces.read(path)
    names = ["allreduce.noname", *(f"allreduce.noname ({number})" for number in (2, 3, 4))]
    assert sorted(found.spans) == sorted(names), "and there are no more than run at the same time"
    assert sum(len(spans) for spans in found.spans.values()) == 2 * 20 * 4
    assert 1 <= len(found.instants("CYCLE_START")) <= 20 * 4


def _in_a_set(path: str) -> None:
    import torch

    import horovod.torch as hvd

    alone = hvd.add_process_set([0])
    hvd.start_timeline(path)
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(2), name="x", process_set=alone)
    hvd.allreduce(torch.ones(2), name="x")
    hvd.stop_timeline()
    hvd.remove_process_set(alone)


def test_process_sets_are_told_apart(dynamic: World, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    dynamic.run(_in_a_set, str(path))
    found = traces.read(path)
    assert set(found.spans) == {"allreduce.x [ranks 0]", "allreduce.x"}
    assert found.spans["allreduce.x [ranks 0]"][1].activities == ["LOCAL_ALLREDUCE"]


def _mismatch(path: str) -> None:
    import torch

    import horovod.torch as hvd

    hvd.start_timeline(path)
    with pytest.raises(hvd.HorovodInternalError, match=ends_with(OperationCode.MISMATCHED)):
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="wrong")
    hvd.stop_timeline()


def test_an_error_ends_the_span_and_is_in_it(dynamic: World, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    dynamic.run(_mismatch, str(path))
    (span,) = traces.read(path).spans["allreduce.wrong"]
    assert span.name == "NEGOTIATE_ALLREDUCE"
    assert "Mismatched" in span.arguments["error"]


# -- when it is there --------------------------------------------------------------------------------------------------
def _rank_1_is_late(path: str) -> None:
    import torch

    import horovod.torch as hvd

    def waits() -> bool:
        """The file is complete, though it is being written, and shows an operation that has begun and not ended."""
        with contextlib.suppress(json.JSONDecodeError):  # caught between the two halves of a write
            events: list[dict[str, Any]] = json.loads(Path(path).read_text())
            return [event["ph"] for event in events if event["name"].startswith("NEGOTIATE")] == ["B"]
        return False

    hvd.start_timeline(path)
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="late")
        pause = threading.Event()
        while not waits():  # there is no event to wait for
            pause.wait(0.01)
        hvd.barrier()
        hvd.synchronize(handle)
    else:
        hvd.barrier()
        hvd.allreduce(torch.ones(2), name="late")
    hvd.stop_timeline()


def test_what_waits_is_seen_while_it_waits(dynamic: World, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    dynamic.run(_rank_1_is_late, str(path))
    assert len(traces.read(path).spans["allreduce.late"]) == 2


def _files(folder: str) -> None:
    import torch

    import horovod.torch as hvd

    def reduce(name: str) -> None:
        hvd.allreduce(torch.ones(2), name=name)

    def open_files() -> list[str]:
        links = []
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return [link for link in links if link.startswith(folder)]

    reduce("before")
    hvd.start_timeline(f"{folder}/1.json")
    reduce("first")
    hvd.stop_timeline()
    hvd.stop_timeline()
    reduce("between")
    hvd.start_timeline(f"{folder}/2.json")
    reduce("second")
    if hvd.rank() == 0:
        with pytest.raises(
            ValueError, match=ends_with(EngineCode.TIMELINE, f"{folder}/none/x.json", "No such file or directory")
        ):
            hvd.start_timeline(f"{folder}/none/x.json")
    else:
        hvd.start_timeline(f"{folder}/none/x.json")  # not the path that counts
    reduce("still the second")
    hvd.start_timeline(f"{folder}/3.json")  # completes the second
    reduce("third")
    hvd.start_timeline(f"{folder}/3.json")  # anew
    reduce("third again")
    assert open_files() == ([f"{folder}/3.json"] if hvd.rank() == 0 else [])
    child = os.fork()
    if child == 0:
        os._exit(len(open_files()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a forked child keeps no copy"
    hvd.stop_timeline()
    assert open_files() == []


def test_any_number_of_files_one_after_the_other(dynamic: World, tmp_path: Path) -> None:
    dynamic.run(_files, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.json", "2.json", "3.json"]
    names = {number: set(traces.read(tmp_path / f"{number}.json").spans) for number in (1, 2, 3)}
    assert names == {
        1: {"allreduce.first"},
        2: {"allreduce.second", "allreduce.still the second"},
        3: {"allreduce.third again"},
    }


# -- a world of one ----------------------------------------------------------------------------------------------------
@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    import horovod.torch as hvd

    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)
    yield monkeypatch
    hvd.shutdown()


def test_from_init_to_shutdown(alone: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    import horovod.torch as hvd

    path = tmp_path / "timeline.json"
    alone.setenv("HOROVOD_TIMELINE", str(path))
    alone.setenv("HOROVOD_TIMELINE_MARK_CYCLES", "1")
    hvd.init()
    hvd.allreduce(torch.ones(2), name="x")
    hvd.shutdown()
    found = traces.read(path)
    assert [(span.name, span.activities) for span in found.spans["allreduce.x"]] == [
        ("NEGOTIATE_ALLREDUCE", []),
        ("ALLREDUCE", ["LOCAL_ALLREDUCE"]),
    ]
    assert len(found.instants("CYCLE_START")) == 1


@pytest.mark.parametrize(("name", "cause"), [("none/x.json", "No such file"), (".", "Is a directory")])
def test_a_path_that_cannot_be_written_is_said(
    alone: pytest.MonkeyPatch, tmp_path: Path, name: str, cause: str
) -> None:
    import horovod.torch as hvd

    path = tmp_path / name
    alone.setenv("HOROVOD_TIMELINE", str(path))
    with pytest.raises(ValueError, match=ends_with(EngineCode.TIMELINE, f"HOROVOD_TIMELINE={path}", "rank 0", cause)):
        hvd.init()
    assert not hvd.is_initialized()
    alone.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    hvd.init()
    with pytest.raises(ValueError, match=ends_with(EngineCode.TIMELINE, path, cause)):
        hvd.start_timeline(str(path))
    for no_path in ("", "a\0b"):
        with pytest.raises(ValueError, match=ends_with(EngineCode.TIMELINE)):
            hvd.start_timeline(no_path)
    hvd.stop_timeline()


def test_a_file_that_can_take_no_more_is_reported(
    alone: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    import resource
    import signal

    import torch

    import horovod.torch as hvd

    alone.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    hvd.init()
    path = tmp_path / "timeline.json"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        hvd.start_timeline(str(path))
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        for _ in range(100):
            assert hvd.allreduce(torch.ones(1), name="x").item() == 1
        hvd.stop_timeline()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    told = [record.getMessage() for record in caplog.records if "timeline" in record.getMessage()]
    [sentence] = told
    assert re.search(ends_with(EngineCode.TIMELINE, path, "File too large"), sentence)
    events = json.loads(path.read_text())
    assert events[0]["args"]["name"] == "Horovod"
    assert 0 < path.stat().st_size <= 4096


def test_nothing_is_left_behind(alone: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from resources import held, leaks  # not to be found by the ranks, which import this module

    import horovod.torch as hvd

    alone.setenv("HOROVOD_TIMELINE", "DYNAMIC")

    def cycle(stop: bool) -> None:
        hvd.init()
        for _ in range(3):
            hvd.start_timeline(str(tmp_path / "timeline.json"))
        if stop:
            hvd.stop_timeline()
        hvd.shutdown()
        traces.read(tmp_path / "timeline.json")

    cycle(True)
    before = held()
    for number in range(50):
        cycle(number % 2 == 0)
    assert not leaks(before)


def _be_killed_after_a_step(path: str) -> list[str]:
    """Rank 0 is lost when its first world's file has the step. Returns what the next world has written."""
    import torch

    import horovod.torch as hvd

    state = hvd.elastic.TorchState(batch=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        hvd.allreduce(torch.ones(1), name=f"of.{hvd.size()}")
        if hvd.size() == 2:
            if hvd.rank() == 0:
                while "of.2" not in Path(path).read_text():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.barrier()

    train(state)
    hvd.shutdown()
    return sorted(os.listdir(Path(path).parent))


def test_each_world_of_an_elastic_job_has_its_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    environment = {"HOROVOD_MIN_SIZE": "1", "HOROVOD_MAX_SIZE": "2", "HOROVOD_TIMELINE": str(path)}
    with World(2, "shm", environment) as world:
        outcomes = world.outcomes(_be_killed_after_a_step, str(path))
    assert [outcome.text for outcome in outcomes] == ["", ""]
    assert outcomes[1].value == ["trace.epoch-2.json", "trace.json"]
    assert "allreduce.of.2" in path.read_text()
    json.loads(path.read_text())
    assert "allreduce.of.1" in traces.read(tmp_path / "trace.epoch-2.json").spans
