"""Same world, same inputs, same bits: whatever the transport, the order of arrival, fusion, threads or a restart.

What must come out is in reductions.py; for Adasum, which has no reference, the bits of the first run are those of all.
Delays are made by event order: a baton goes through all submissions of all ranks in a random order, so that who comes
first and last differs from case to case and never depends on the clock. A rank that is late in the middle of an
operation is a process that stops itself there, and goes on when all others have come to wait for it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from processes import DEADLINE_SECONDS, Processes, RankProcess
from reductions import Op, digest, inputs, part_of, reference, submit
from resources import eventually
from world import (
    ADASUM,
    ALLREDUCE,
    AVERAGE,
    PRODUCT,
    REDUCESCATTER,
    SPARSE,
    SUM,
    TRANSPORTS,
    EngineWorld,
    Member,
    hosts_of,
)

COUNTS = (0, 1, 3, 64, 500, 2049, 9_000, 40_001)
MANY_BLOCKS = (3, 2049, 40_001, 150_001)
FACTORS = ((1.0, 1.0), (1.0, 1.0), (0.3, 1.0), (1.0, 0.7), (3.0, 0.1))  # pre- and postscale
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Case:
    size: int
    ops: tuple[Op, ...]
    threads: int  # of each rank
    connections: int
    options: dict[str, int]
    seed: int


def so_many(few: int, many: int) -> settings:
    """How many worlds are made, in `make test` and in `make test-all`: the same in every run."""
    return settings(
        max_examples=tiers.pick(few, many),
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )


@st.composite
def cases(
    draw: st.DrawFn,
    adasum: bool = False,
    least: int = 2,
    most: int = 5,
    most_ops: int = 8,
    counts: Sequence[int] = COUNTS,
) -> Case:
    ops = []
    for index in range(draw(st.integers(1, most_ops))):
        kind = ALLREDUCE if adasum else draw(st.sampled_from([ALLREDUCE, ALLREDUCE, ALLREDUCE, REDUCESCATTER]))
        shapes = []
        for count in draw(st.lists(st.sampled_from(counts), min_size=1, max_size=3 if kind == ALLREDUCE else 1)):
            columns = draw(st.sampled_from([1, 3]))
            shapes.append((count // columns, columns) if kind == REDUCESCATTER or columns == 3 else (count,))
        reductions = [SUM, AVERAGE] if kind == REDUCESCATTER else [SUM, AVERAGE, PRODUCT]
        if adasum:
            reductions = [ADASUM, ADASUM, SUM]
        reduce_op = draw(st.sampled_from(reductions))
        factors = (1.0, 1.0) if reduce_op == ADASUM else draw(st.sampled_from(FACTORS))
        ops.append(
            Op(
                f"{'allreduce' if kind == ALLREDUCE else 'reducescatter'}.t{index}",
                kind,
                draw(st.sampled_from(FLOATS)),
                tuple(shapes),
                reduce_op,
                draw(st.booleans()),
                *factors,
            )
        )
    options = {
        "fusion_threshold_bytes": draw(st.sampled_from([0, 100, 5_000, 100_000, 128 << 20])),
        "staging_buffer_bytes": draw(st.sampled_from([4096, 16384, 512 << 10])),
        "staging_buffer_count": draw(st.integers(2, 4)),
        "spin_us": draw(st.sampled_from([0, 50])),
    }
    return Case(
        draw(st.integers(least, most)),
        tuple(ops),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        options,
        draw(st.integers(0, 2**32 - 1)),
    )


Results = list[dict[str, list[np.ndarray]]]  # by rank and name: of each tensor


# -- running -----------------------------------------------------------------------------------------------------------
class Baton:
    """Lets submissions of all ranks happen in one given order. Submitting never blocks, so the order is possible."""

    def __init__(self, order: list[tuple[int, str]]) -> None:
        self._turns = {step: threading.Event() for step in order}
        self._next = dict(itertools.pairwise(order))
        self._turns[order[0]].set()

    def take(self, step: tuple[int, str]) -> None:
        assert self._turns[step].wait(60), f"the baton never came to {step}"

    def give(self, step: tuple[int, str]) -> None:
        if step in self._next:
            self._turns[self._next[step]].set()


def run_round(world: EngineWorld, case: Case, round_seed: int) -> Results:
    """Every rank submits every operation, in an order of its own, from several threads."""
    random = np.random.default_rng([case.seed, round_seed])
    steps = [(rank, op.name) for rank in range(case.size) for op in case.ops]
    order = [steps[i] for i in random.permutation(len(steps))]
    place = {step: i for i, step in enumerate(order)}
    baton = Baton(order)
    thread_of = {step: int(random.integers(case.threads)) for step in steps}
    wait_order = {step: float(random.random()) for step in steps}

    def body(member: Member) -> dict[str, list[np.ndarray]]:
        results: dict[str, list[np.ndarray]] = {}
        errors: list[BaseException] = []

        def thread_body(thread: int) -> None:
            try:
                mine = [op for op in case.ops if thread_of[member.rank, op.name] == thread]
                handles = {}
                for op in sorted(mine, key=lambda op: place[member.rank, op.name]):
                    arrays = inputs(op, member.rank, case.seed)
                    baton.take((member.rank, op.name))
                    handles[op.name] = submit(member, op, arrays)
                    baton.give((member.rank, op.name))
                for op in sorted(mine, key=lambda op: wait_order[member.rank, op.name]):
                    got = member.wait(handles[op.name])
                    results[op.name] = got if isinstance(got, list) else [got]
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=thread_body, args=(thread,)) for thread in range(case.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), f"rank {member.rank} hangs; {errors}"
        if errors:
            raise errors[0]
        return results

    return world.run(body)


def check(
    case: Case,
    results: Results,
    where: str,
    hosts: Sequence[int] = (),
    first: Results | None = None,
    sparse: bool = False,
) -> None:
    """Against the reference; Adasum against what rank 0 had in the `first` run."""
    for op in case.ops:
        for index in range(len(op.shapes)):
            if op.reduce_op == ADASUM:
                expected = (first or results)[0][op.name][index]
            else:
                expected = reference(op, index, case.size, case.seed, hosts, sparse)
            for rank, result in enumerate(results):
                want = part_of(op, expected, case.size, rank)
                got = np.ascontiguousarray(result[op.name][index])
                assert got.shape == want.shape
                assert got.tobytes() == want.tobytes(), (
                    f"{op} tensor {index} on rank {rank} ({where}) has other bits in elements "
                    f"{np.flatnonzero(got.view(np.uint8) != np.ascontiguousarray(want).view(np.uint8))[:5]}"
                )


@pytest.mark.longer
@pytest.mark.timeout(300)
@so_many(10, 60)
@given(case=cases())
def test_same_world_same_inputs_same_bits(case: Case) -> None:
    check_transports(case, (*TRANSPORTS, "hosts"))


def check_transports(case: Case, transports: Sequence[str]) -> None:
    for number, transport in enumerate(transports):
        with EngineWorld(case.size, transport, connections=case.connections, **case.options) as world:
            for turn in range(2):  # first negotiated, then known: they may be fused in other ways
                results = run_round(world, case, 10 * number + turn)
                sparse = transport in SPARSE
                check(case, results, f"{transport}, turn {turn}", world.hosts, sparse=sparse)


@pytest.mark.longer
@pytest.mark.timeout(300)
@so_many(6, 40)
@given(case=cases(most=9))
def test_same_bits_over_a_sparse_mesh(case: Case) -> None:
    check_transports(case, SPARSE)


@pytest.mark.longer
@pytest.mark.timeout(300)
@so_many(4, 20)
@given(case=cases(adasum=True), other_threshold=st.sampled_from([0, 5_000, 128 << 20]))
def test_adasum_has_the_same_bits_in_every_run_of_a_world(case: Case, other_threshold: int) -> None:
    """Other neighbours in a batch, another order and another number of threads change nothing; sums come in between."""
    again = replace(
        case, threads=case.threads % 3 + 1, options={**case.options, "fusion_threshold_bytes": other_threshold}
    )
    for transport in (*TRANSPORTS, "hosts", *SPARSE):
        first: Results | None = None
        for number, run in enumerate((case, again)):
            with EngineWorld(run.size, transport, connections=run.connections, **run.options) as world:
                for turn in range(2):
                    results = run_round(world, run, 10 * number + turn)
                    where = f"{transport}, run {number}, turn {turn}"
                    check(run, results, where, world.hosts, first, transport in SPARSE)
                    first = first or results


# -- late in the middle ------------------------------------------------------------------------------------------------
TURNS = 4
Stops = list[tuple[int, int]]  # after how many batches of a run a rank stops itself, and how long after they began


@st.composite
def stopped_cases(draw: st.DrawFn) -> tuple[Case, list[tuple[int, Stops]]]:
    """A case, and for each of its runs the rank that stops, and where."""
    case = draw(cases(adasum=draw(st.booleans()), least=3, most_ops=4, counts=MANY_BLOCKS))
    runs = []
    for victim in draw(st.permutations(range(case.size)))[:2]:
        batches = sorted(draw(st.sets(st.integers(1, TURNS), min_size=1, max_size=3)))
        runs.append((victim, [(batch, draw(st.integers(0, 30_000))) for batch in batches]))
    return case, runs


def states(rank: RankProcess) -> set[str]:
    """Of all threads of a process: R runs, S sleeps, T is stopped (proc_pid_stat(5))."""
    found = set()
    for file in Path(f"/proc/{rank.pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found.add(file.read_text().rpartition(")")[2].split()[0])
    return found


def run_stopped(ranks: list[RankProcess], case: Case, victim: int, stops: Stops) -> list[list[Any]]:
    """The digests of all results, by rank and turn."""
    for number, rank in enumerate(ranks):
        arguments = {"ops": [asdict(op) for op in case.ops], "seed": case.seed, "turns": TURNS}
        rank.tell("reduce", **arguments, stops=stops if number == victim else [])
    others = [rank for number, rank in enumerate(ranks) if number != victim]
    for _ in stops:
        assert eventually(lambda: states(ranks[victim]) == {"T"}, DEADLINE_SECONDS)
        assert eventually(lambda: all(states(rank) == {"S"} for rank in others), DEADLINE_SECONDS)
        os.kill(ranks[victim].pid, signal.SIGCONT)
    return [[rank.answer("bits", "error") for _ in range(TURNS)] for rank in ranks]


@pytest.mark.longer
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", tiers.some(["hosts", "shm", "tcp"], 1))
def test_a_rank_that_stops_in_the_middle_changes_no_bit(transport: str) -> None:
    with Processes() as processes:
        started = processes.start(5)

        # The first failure is the last: the processes may be in the middle of anything then.
        @settings(max_examples=tiers.pick(2, 10), deadline=None, derandomize=True, phases=[Phase.generate])
        @given(drawn=stopped_cases())
        def body(drawn: tuple[Case, list[tuple[int, Stops]]]) -> None:
            case, runs = drawn
            ranks = started[: case.size]
            processes.form(ranks, transport, **case.options)
            undisturbed = run_stopped(ranks, case, 0, [])
            disturbed = [run_stopped(ranks, case, victim, stops) for victim, stops in runs]
            processes.close(ranks)
            hosts = hosts_of(case.size) if transport == "hosts" else []
            for number, op in enumerate(case.ops):
                for index in range(len(op.shapes)):
                    whole = None if op.reduce_op == ADASUM else reference(op, index, case.size, case.seed, hosts)
                    for rank in range(case.size):
                        want = undisturbed[0][0][number][index]
                        if whole is not None:
                            want = digest(part_of(op, whole, case.size, rank))
                        for run, results in enumerate([undisturbed, *disturbed]):
                            got = {turn[number][index] for turn in results[rank]}
                            assert got == {want}, f"{op} tensor {index} on rank {rank} has other bits in run {run}"

        body()


def test_the_reference_depends_on_the_order_of_the_ranks() -> None:
    """Else the test above would prove nothing."""
    op = Op("allreduce.t0", ALLREDUCE, "float32", ((2049,),), SUM, True)
    parts = [inputs(op, rank, 1)[0] for rank in range(3)]
    assert (parts[0] + parts[1] + parts[2]).tobytes() != (parts[2] + parts[1] + parts[0]).tobytes()
    assert reference(op, 0, 3, 1).tobytes() == (parts[0] + parts[1] + parts[2]).tobytes()
    assert reference(op, 0, 3, 1, [0, 1, 0]).tobytes() == (parts[0] + parts[2] + parts[1]).tobytes()
    assert reference(op, 0, 3, 1, [0, 1, 1]).tobytes() == (parts[0] + (parts[1] + parts[2])).tobytes()
    assert reference(op, 0, 3, 1, [0, 1, 1]).tobytes() != reference(op, 0, 3, 1).tobytes()


def test_the_reference_of_a_sparse_mesh_is_a_balanced_tree() -> None:
    op = Op("allreduce.t0", ALLREDUCE, "float32", ((2049,),), SUM, True)
    a, b, c, d, e = (inputs(op, rank, 1)[0] for rank in range(5))
    assert reference(op, 0, 3, 1, sparse=True).tobytes() == ((a + c) + b).tobytes()
    assert reference(op, 0, 4, 1, sparse=True).tobytes() == ((a + b) + (c + d)).tobytes()
    assert reference(op, 0, 5, 1, sparse=True).tobytes() == (((a + e) + b) + (c + d)).tobytes()
    assert reference(op, 0, 5, 1, [0, 1, 1, 2, 0], sparse=True).tobytes() == (((a + e) + d) + (b + c)).tobytes()
    assert reference(op, 0, 4, 1, sparse=True).tobytes() != reference(op, 0, 4, 1).tobytes()
