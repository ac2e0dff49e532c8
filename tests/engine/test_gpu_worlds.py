"""GPU tensors where ranks are processes that die, and where a real coordinator compares what ranks submit."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tiers
from error_codes import ends_with
from event_words import NO_NCCL, THROUGH_HOST_MEMORY
from gpu_world import Gpu, GpuMember, StandIns
from native_builds import gpu_libraries
from processes import Processes
from world import ALLGATHER, ALLREDUCE, ALLREDUCE_SUM, AVERAGE, SUM

from horovod.base.errors import OperationCode
from horovod.base.settings import resolve
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.worker.runtime.epoch import begin, end
from horovod.worker.runtime.formation import Context

pytestmark = pytest.mark.timeout(300)


_EVERY_OPERATION = 31  # as bits


@pytest.fixture(scope="module")
def files() -> list[str]:
    return [str(file) for file in gpu_libraries()]


@pytest.fixture(scope="module")
def libraries(files: list[str]) -> StandIns:
    return StandIns(files)


# -- ranks that die ----------------------------------------------------------------------------------------------------
@pytest.mark.longer
@pytest.mark.parametrize(
    ("transport", "way"),
    tiers.some([(by, way) for way in ("nccl", "nccl by sockets", "host") for by in ("shm", "tcp", "hosts")], 4),
)
def test_killed_at_any_point(files: list[str], monkeypatch: pytest.MonkeyPatch, transport: str, way: str) -> None:
    """Kernels never end once a peer is gone: the others are freed, told which rank it was, and form the next world.

    Where NCCL uses sockets it has an error of its own, which comes as early as ours and names nobody.
    """
    chance = random.Random(transport)
    options = {"host_operations": _EVERY_OPERATION, "staging_bytes": 16 << 10} if way == "host" else {}
    if way == "nccl by sockets":
        monkeypatch.setenv("STANDIN_NCCL_REMOTE_ERRORS", "1")
    with Processes() as processes:
        ranks = processes.start(3)
        for _ in range(tiers.pick(1, 3)):
            processes.form(ranks, transport, files, **options)
            for rank in ranks:
                rank.tell("gpu_loop", elements=10_000, steps=1_000_000)
            victim = chance.randrange(3)
            for _ in range(chance.randrange(0, 4)):
                ranks[victim].answer("step")
            for _ in range(chance.randrange(200_000)):  # somewhere in the next step, or the one after it
                pass
            ranks[victim].process.kill()
            survivors = [rank for rank in ranks if rank is not ranks[victim]]
            for rank in survivors:
                error = rank.answer("error", "done", "wrong")
                facts = f"ank {victim} (pid {ranks[victim].pid}) on host here"
                assert re.search(ends_with(OperationCode.PEER_LOST, facts), str(error))
            processes.close(survivors)
            processes.form(survivors, transport, files, **options)
            for rank in survivors:
                rank.tell("gpu_loop", elements=100, steps=3)
            assert [rank.answer("done", "error", "wrong") for rank in survivors] == [3, 3]
            processes.close(survivors)
            ranks[victim] = processes.start(1)[0]


@pytest.mark.parametrize("transport", ["shm", "tcp", "hosts"])
def test_killed_while_the_kernels_of_the_others_wait_for_it(files: list[str], transport: str) -> None:
    """Their threads wait for their GPUs, so nobody but the engine's background thread can notice."""
    with Processes() as processes:
        ranks = processes.start(3)
        processes.form(ranks, transport, files)
        for number, rank in enumerate(ranks):
            rank.tell("gpu_loop", elements=1000, steps=1_000_000, stand_still=number == 1)
        assert ranks[1].answer("stands_still") is True
        ranks[1].process.kill()
        for rank in (ranks[0], ranks[2]):
            error = rank.answer("error", "done", "wrong")
            assert re.search(ends_with(OperationCode.PEER_LOST, f"ank 1 (pid {ranks[1].pid}) on host here"), str(error))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_is_missing_when_nccl_starts_is_named(files: list[str], transport: str) -> None:
    with Processes() as processes:
        ranks = processes.start(3)
        processes.form(ranks, transport, files, progress_timeout_ms=2000)
        for number, rank in enumerate(ranks):
            rank.tell("gpu_loop", elements=1000, steps=1, stop=number == 1)
        for rank in (ranks[0], ranks[2]):
            error = rank.answer("error", "done", "wrong")
            facts = f"rank 1 (pid {ranks[1].pid}) on host here"
            assert re.search(ends_with(OperationCode.NO_PROGRESS, facts), str(error))
        os.kill(ranks[1].pid, signal.SIGCONT)


# -- with a coordinator ------------------------------------------------------------------------------------------------
class World:
    """Ranks that are threads, formed as hvd.init() forms them."""

    def __init__(self, libraries: StandIns, size: int, nccl: bool) -> None:
        self._coordinator = EmbeddedCoordinator()
        address = self._coordinator.__enter__().address
        explicit: dict[str, Any] = {"coordinator": address, "size": size}
        explicit |= {"cuda_library": libraries.cuda_file, "nccl_library": libraries.nccl_file if nccl else "/nowhere"}
        explicit |= {"nvrtc_library": libraries.nvrtc_file}
        settings = resolve({}, explicit)
        self._pool = ThreadPoolExecutor(size)
        contexts = list(self._pool.map(lambda _: begin(settings), range(size)))
        self.contexts: list[Context] = sorted(contexts, key=lambda context: context.world.rank)
        self.members = [
            GpuMember(context.engine, rank, size, Gpu(libraries, rank)) for rank, context in enumerate(self.contexts)
        ]

    def run(self, body: Callable[[GpuMember], Any]) -> list[Any]:
        return list(self._pool.map(body, self.members))

    def close(self) -> None:
        list(self._pool.map(end, self.contexts))
        self._pool.shutdown()
        self._coordinator.__exit__(None, None, None)


@pytest.fixture(params=[True, False], ids=["nccl", "host"])
def trio(request: pytest.FixtureRequest, libraries: StandIns) -> Iterator[World]:
    made = World(libraries, 3, request.param)
    yield made
    made.close()


def test_a_cpu_tensor_against_gpu_tensors_is_told(trio: World) -> None:
    def body(member: GpuMember) -> str:
        array = np.ones(4, np.float32)
        if member.rank == 1:
            handle = member.engine.submit(
                ALLREDUCE_SUM, "allreduce.x", [(array.ctypes.data, array.ctypes.data, 7, (4,))]
            )
        else:
            handle = member.allreduce_async(array, "allreduce.x")
        with pytest.raises(RuntimeError) as raised:
            handle.result()
        member.allreduce(array, "allreduce.y")  # all on GPUs
        return str(raised.value)

    for error in trio.run(body):
        assert re.search(ends_with(OperationCode.MISMATCHED, "ranks 0 and 2 have GPU", "rank 1 has CPU"), error)


def test_ranks_that_have_joined_contribute_zeros_on_their_gpus(trio: World) -> None:
    def body(member: GpuMember) -> list[float]:
        results = [float(member.allreduce(np.ones(4, np.float32), "allreduce.known")[0])]
        for step in range(member.rank):  # the first has no data at all
            got = member.allreduce(np.full(4, 6.0, np.float32), "allreduce.known", AVERAGE if step else SUM)
            results.append(float(got[0]))
        last = member.engine.join()
        assert last == 2
        gathered = member.finish(member.start(ALLGATHER, "allgather.x", [member.array(np.ones(1, np.float32))], [None]))
        assert gathered[0].shape == (3,)
        return results

    # Only ranks 1 and 2 are there in the first step, only rank 2 in the second, whose average is over all ranks.
    assert trio.run(body) == [[3.0], [3.0, 12.0], [3.0, 12.0, 2.0]]


@pytest.mark.parametrize("named", [True, False])
def test_a_rank_joins_that_has_used_no_gpu(trio: World, named: bool) -> None:
    """hvd.join(device) says which one it would have used."""

    def body(member: GpuMember) -> list[float]:
        if member.rank == 0:
            assert member.engine.join(member.gpu.ordinal if named else -1) in (1, 2)
            return []
        results = [float(member.allreduce(np.full(4, 6.0, np.float32), f"allreduce.{i}")[0]) for i in range(3)]
        member.engine.join()
        return results

    if named:
        assert trio.run(body) == [[], [12.0] * 3, [12.0] * 3]
    else:
        with pytest.raises(RuntimeError, match=ends_with(OperationCode.WRONG_GPU, "hvd.join(device)")):
            trio.run(body)


def test_the_log_says_why_there_is_no_nccl(libraries: StandIns, caplog: pytest.LogCaptureFixture) -> None:
    made = World(libraries, 2, nccl=False)
    with caplog.at_level("INFO", logger="horovod"):
        made.run(lambda member: member.allreduce(np.ones(4, np.float32)))
        made.close()
    said = [record.getMessage() for record in caplog.records if THROUGH_HOST_MEMORY in record.getMessage()]
    assert len(said) == 1
    assert f"GPU tensors of the world go {THROUGH_HOST_MEMORY}, for the reason of rank 0 " in said[0]
    assert f"{NO_NCCL}: " in said[0]


@pytest.mark.parametrize("trio", [True], ids=["nccl"], indirect=True)
def test_zeros_of_ranks_that_have_joined_are_packed(trio: World, libraries: StandIns) -> None:
    def body(member: GpuMember) -> list[float]:
        def group(value: float) -> list[float]:
            arrays = [member.array(np.full(3 + i, value, np.float32)) for i in range(10)]
            member.finish(member.start(ALLREDUCE, "grouped.known", arrays, list(arrays), reduce_op=SUM))
            return sorted({float(number) for array in arrays for number in array.numpy()})

        results = group(1.0)
        for _ in range(member.rank):
            results += group(6.0)
        member.engine.join()
        return results

    before = libraries.count("launches")
    assert trio.run(body) == [[3.0], [3.0, 12.0], [3.0, 12.0, 6.0]]
    assert libraries.count("launches") == before + 3 * 3 * 2
