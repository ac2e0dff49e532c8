"""Process sets from hvd.init() to the end of the world, and what happens when one cannot be formed."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from error_codes import ends_with
from runtime_harness import Program, await_first, close_all, world

from horovod.base.errors import EngineCode, WorldCode
from horovod.base.settings import resolve
from horovod.worker.runtime import process_sets as module
from horovod.worker.runtime.epoch import begin
from horovod.worker.runtime.formation import Context
from horovod.worker.runtime.process_sets import differences_of, initial_sets, problem_of


@pytest.mark.parametrize(
    ("sets", "size", "code", "facts"),
    [
        ([[]], 2, WorldCode.INVALID_PROCESS_SET, []),
        ([[0, 0]], 2, WorldCode.INVALID_PROCESS_SET, ["[0, 0]"]),
        ([[0, 2]], 2, WorldCode.INVALID_PROCESS_SET, ["[0, 2]", "0 to 1"]),
        ([[-1]], 2, WorldCode.INVALID_PROCESS_SET, ["[-1]", "0 to 1"]),
        ([[0, 1]], 2, WorldCode.DUPLICATE_PROCESS_SET, ["[0, 1]"]),
        ([[0], [1], [0]], 3, WorldCode.DUPLICATE_PROCESS_SET, ["[0]"]),
    ],
)
def test_sets_that_make_no_sense(sets: list[list[int]], size: int, code: WorldCode, facts: list[str]) -> None:
    assert re.search(ends_with(code, *facts), problem_of(sets, size, [range(size)]))


def test_sets_that_do() -> None:
    assert problem_of([[0], [1], [0, 1]], 3, [range(3), [1, 2]]) == ""


@pytest.mark.parametrize(
    ("asked", "size", "ranks", "ids"),
    [
        ([[0, 1], [2], [1, 2]], 3, [[0, 1], [2], [1, 2]], [1, 2, 3]),
        ([[0, 1], [2], [1, 2]], 2, [[0, 1], [], [1]], [None, None, 3]),
        ([[0, 1], [2], [1, 2]], 1, [[0], [], []], [None, None, None]),
        ([[0, 1], [2], [1, 2]], 9, [[0, 1], [2], [1, 2]], [1, 2, 3]),
        ([[0, 1, 3], [0, 1, 4]], 3, [[0, 1], [0, 1]], [1, None]),
        ([[0, 1, 3], [0, 1]], 3, [[0, 1], [0, 1]], [None, 2]),
        ([], 2, [], []),
    ],
)
def test_what_becomes_of_sets_in_smaller_worlds(
    asked: list[list[int]], size: int, ranks: list[list[int]], ids: list[int | None]
) -> None:
    sets = initial_sets(asked, size)
    assert ([one.ranks for one in sets], [one.set_id for one in sets]) == (ranks, ids)


def test_what_is_said_of_sets_in_smaller_worlds() -> None:
    asked = [[0, 1], [0, 2], [2], [1]]
    told = differences_of(asked, initial_sets(asked, 2))
    assert [sentence.partition("]")[0] for sentence in told] == ["[0, 1", "[0, 2", "[2"], "the set that differs"
    assert [sentence.count("not registered") for sentence in told] == [1, 0, 1]
    assert told[1].endswith(" [0]"), "what is left of it"
    assert differences_of(asked, initial_sets(asked, 3)) == []


def everywhere(contexts: Sequence[Context], act: Callable[[Context], Any]) -> list[Any]:
    """What `act` gives on each rank: its value, or its exception."""

    def attempt(context: Context) -> Any:
        try:
            return act(context)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(contexts)) as pool:
        return list(pool.map(attempt, contexts))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_several_at_once_and_the_smallest_free_id(coordinator, transport):
    with world(coordinator.address, 3, transport=transport) as contexts:
        assert everywhere(contexts, lambda c: c.process_sets.add([[0, 1], [2], [1, 2]])) == [[1, 2, 3]] * 3
        numbers = [contexts[0].process_sets.number(1, [0, 1]), contexts[0].process_sets.number(3, [1, 2])]
        assert contexts[0].process_sets.number(1, [0, 2]) is contexts[0].process_sets.number(4, [0]) is None
        everywhere(contexts, lambda c: c.process_sets.remove(1))
        assert everywhere(contexts, lambda c: c.process_sets.add([[0]])) == [[1]] * 3
        # The id is the old one, what the engine and the coordinator call the set is not.
        assert contexts[2].process_sets.number(1, [0]) not in numbers
        assert contexts[0].process_sets.number(0, [0, 1, 2]) == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("when", ["before", "while connecting"])
def test_a_rank_that_fails_is_named_on_all_and_the_world_goes_on(coordinator, monkeypatch, transport, when):
    real = module.ProcessSets._part if when == "before" else module.ProcessSets._connect

    def failing(self: Any, *arguments: Any) -> Any:
        if self._world.rank == 1 and attempt == 1:
            raise OSError("no more of that.")
        return real(self, *arguments)

    monkeypatch.setattr(module.ProcessSets, real.__name__, failing)
    with world(coordinator.address, 3, transport=transport, start_timeout_seconds=2) as contexts:
        attempt = 1
        for error in everywhere(contexts, lambda c: c.process_sets.add([[0], [1, 2]])):
            assert isinstance(error, ValueError)
            assert re.search(ends_with(EngineCode.INTERNAL, "rank 1 (pid ", "no more of that."), str(error))
        attempt = 2
        assert everywhere(contexts, lambda c: c.process_sets.add([[0], [1, 2]])) == [[1, 2]] * 3


def test_a_set_within_one_host_uses_shared_memory_though_the_world_cannot(coordinator):
    def member(rank: int) -> Context:
        host = "node-a" if rank < 2 else "node-b"
        explicit = {"coordinator": coordinator.address, "size": 3, "rank": rank, "hostname": host}
        return begin(resolve({}, explicit))

    with ThreadPoolExecutor(3) as pool:
        contexts = list(pool.map(member, range(3)))
    try:
        assert {context.transport for context in contexts} == {"tcp+shm"}
        sets = contexts[0].process_sets
        with sets._part([0, 1]) as near, sets._part([0, 2]) as far:
            assert list(near.offer) == ["segment"]
            assert list(far.offer) == ["endpoints"]
            assert (near.hosts, far.hosts) == ([], [])
        assert everywhere(contexts, lambda c: c.process_sets.add([[0, 1], [0, 2]])) == [[1, 2]] * 3
    finally:
        close_all(contexts)


# -- through the public API, in processes ------------------------------------------------------------------------------
SETS = """
from horovod.base.errors import EngineCode, WorldCode, code_of
from horovod.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

def total(process_set):
    data = array("f", [1.0 + hvd.rank()])
    pointer = data.buffer_info()[0]
    context = current()
    number = context.process_sets.number(process_set.process_set_id, process_set.ranks)
    tensors = [(pointer, pointer, 7, (1,))]
    context.engine.submit(OpSpec(0, process_set=number), "allreduce.total", tensors).result()
    return data[0]

def refused(act, *arguments, **options):
    try:
        act(*arguments, **options)
    except (ValueError, HorovodInternalError) as error:
        return str(error)
"""

STATIC = """
sets = [ProcessSet([0, 1]), ProcessSet([2]), ProcessSet([1, 2])]
for _ in range(2):
    hvd.init(process_sets=iter([*sets, global_process_set]))
    assert [one.process_set_id for one in sets] == [1, 2, 3]
    print([total(one) for one in sets if one.included()])
    assert code_of(refused(add_process_set, [0])) is WorldCode.STATIC_PROCESS_SETS
    assert code_of(refused(remove_process_set, sets[0])) is WorldCode.STATIC_PROCESS_SETS
    hvd.shutdown()
    assert [one.process_set_id for one in sets] == [None, None, None]
hvd.init(process_sets="Dynamic")
added = add_process_set([0, 1])
assert added.process_set_id == 1
hvd.shutdown()
assert added.process_set_id is None
hvd.init()
assert not remove_process_set(added)
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_static_sets_come_back_with_the_next_world_and_dynamic_ones_do_not(coordinator, transport):
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "3", "HOROVOD_TRANSPORT": transport}
    programs = [Program(SETS + STATIC, HOROVOD_RANK=str(rank), **common) for rank in range(3)]
    sums = [program.finish().splitlines() for program in programs]
    assert sums == [["[3.0]"] * 2, ["[3.0, 5.0]"] * 2, ["[3.0, 5.0]"] * 2]


@pytest.mark.parametrize(("others", "what"), [("None", "process_sets"), ("'dynamic'", "dynamic_process_sets")])
def test_ranks_that_begin_with_different_sets_do_not_form_a_world(coordinator, others, what):
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "2"}
    script = "print(refused(hvd.init, process_sets={}), hvd.is_initialized())"
    with Program(SETS + script.format("[ProcessSet([0])]"), **common) as first:
        assert await_first(coordinator)
        with Program(SETS + script.format(others), **common) as other:
            refusal = other.finish()
        coordinator.give_up("default", "The other one was refused.")
        sentences = [first.finish(), refusal]
    assert all(one.startswith("Horovod initialization failed. ") and one.endswith("False") for one in sentences)
    assert re.search(ends_with(WorldCode.MEMBERS_DISAGREE, f" {what},"), refusal.removesuffix(" False")), refusal


LOST = """
hvd.init(process_sets=[ProcessSet([0, 1])])
allreduce("first")
both = ProcessSet([0, 1])
both.process_set_id = 1
if both.included():
    total(both)
if hvd.rank() == 1:
    sys.stdin.readline()  # until the others have their results, too
    os.kill(os.getpid(), signal.SIGKILL)
print("ready", flush=True)
print(refused(total, both) if hvd.rank() == 0 else refused(allreduce, "never"), flush=True)
print(refused(allreduce, "later") is not None, flush=True)
hvd.shutdown()
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_lost_in_a_set_ends_the_world(coordinator, transport):
    """Rank 0 sees it through the set, rank 2, which is in none, hears of it."""
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "3", "HOROVOD_TRANSPORT": transport}
    programs = [Program(SETS + LOST, HOROVOD_RANK=str(rank), **common) for rank in range(3)]
    assert [programs[rank].line() for rank in (0, 2)] == ["ready", "ready"]
    programs[1].tell()
    for rank in (0, 2):
        cause, later = programs[rank].finish().splitlines()
        assert f"ank 1 (pid {programs[1].process.pid}) on host" in cause
        assert later == "True"
    assert programs[1].process.wait() == -signal.SIGKILL


def test_a_forked_child_does_not_disturb_a_set(coordinator):
    script = """
hvd.init(process_sets=[ProcessSet([0, 1])])
both = ProcessSet([0, 1])
both.process_set_id = 1
if both.included():
    total(both)
    if os.fork() == 0:
        assert code_of(refused(total, both)) is EngineCode.FORKED_CHILD
        sys.exit(0)
    assert os.wait()[1] == 0
    print(total(both))
"""
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "3", "HOROVOD_TRANSPORT": "tcp"}
    programs = [Program(SETS + script, HOROVOD_RANK=str(rank), **common) for rank in range(3)]
    assert [program.finish() for program in programs] == ["3.0", "3.0", ""]


def test_a_world_of_one(monkeypatch):
    from horovod.common import basics
    from horovod.common.process_sets import ProcessSet, add_process_set

    duplicate = ends_with(WorldCode.DUPLICATE_PROCESS_SET, "[0]")
    with pytest.raises(ValueError, match=duplicate):
        basics.init(process_sets=[ProcessSet([0])])
    assert not basics.is_initialized()
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    basics.init()
    try:
        with pytest.raises(ValueError, match=duplicate):
            add_process_set([0])
        with pytest.raises(ValueError, match=ends_with(WorldCode.INVALID_PROCESS_SET, "[1]", "0 to 0")):
            add_process_set([1])
    finally:
        basics.shutdown()
