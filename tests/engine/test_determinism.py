"""Same world, same inputs, same bits: whatever the transport, the order of arrival, fusion, threads or a restart.

Inputs have wide exponents, so that any other order of summation, or a rounding in between, changes bits. The reference
is the definition: inputs are prescaled and rounded, then ranks are added (or multiplied) from left to right and the
result postscaled, float16 and bfloat16 in float32 with one rounding at the end; where some ranks of several hosts share
memory, first those of each host and then the hosts' (rounded) results. Adasum has no such reference: its dot products
are sums of another order; there the bits of the first run are those of all.
Delays are made by event order: a baton goes through all submissions of all ranks in a random order, so that who comes
first and last differs from case to case and never depends on the clock.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from world import ADASUM, ALLREDUCE, AVERAGE, DTYPES, PRODUCT, REDUCESCATTER, SUM, TRANSPORTS, EngineWorld, Member

COUNTS = (0, 1, 3, 64, 500, 2049, 9_000, 40_001)
FACTORS = ((1.0, 1.0), (1.0, 1.0), (0.3, 1.0), (1.0, 0.7), (3.0, 0.1))  # pre- and postscale
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Op:
    name: str
    kind: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]  # several: a grouped operation
    reduce_op: int
    in_place: bool
    prescale: float = 1.0
    postscale: float = 1.0


@dataclass(frozen=True)
class Case:
    size: int
    ops: tuple[Op, ...]
    threads: int  # of each rank
    connections: int
    options: dict[str, int]
    seed: int


@st.composite
def cases(draw: st.DrawFn, adasum: bool = False) -> Case:
    ops = []
    for index in range(draw(st.integers(1, 8))):
        kind = ALLREDUCE if adasum else draw(st.sampled_from([ALLREDUCE, ALLREDUCE, ALLREDUCE, REDUCESCATTER]))
        shapes = []
        for count in draw(st.lists(st.sampled_from(COUNTS), min_size=1, max_size=3 if kind == ALLREDUCE else 1)):
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
        "slot_bytes": draw(st.sampled_from([4096, 16384, 512 << 10])),
        "slot_count": draw(st.integers(2, 4)),
        "spin_us": draw(st.sampled_from([0, 50])),
    }
    return Case(
        draw(st.integers(2, 5)),
        tuple(ops),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        options,
        draw(st.integers(0, 2**32 - 1)),
    )


# -- inputs and the reference ------------------------------------------------------------------------------------------
def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 -> bits of bfloat16, to nearest even; for finite values."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def inputs(op: Op, rank: int, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng([seed, rank, int(op.name.rsplit(".t", 1)[1])])
    arrays = []
    for shape in op.shapes:
        widest = 2 if op.reduce_op == PRODUCT else 8  # of five factors, float16 holds nearly all products
        exponents = random.integers(-widest, widest + 1, shape)
        values = np.ldexp(random.standard_normal(shape), exponents).astype(np.float32)
        arrays.append(to_bfloat16(values) if op.dtype == "bfloat16" else values.astype(op.dtype))
    return arrays


def combine(dtype: str, parts: list[np.ndarray], function: np.ufunc = np.add, factor: float = 1.0) -> np.ndarray:
    """From left to right, rounded once."""
    if len(parts) == 1 and factor == 1.0:
        return parts[0]
    wide = np.dtype(np.float64 if dtype == "float64" else np.float32)
    terms = [from_bfloat16(part) if dtype == "bfloat16" else part.astype(wide) for part in parts]
    total = functools.reduce(function, terms) * wide.type(factor)
    with np.errstate(over="ignore"):  # a few products
        return to_bfloat16(total) if dtype == "bfloat16" else total.astype(dtype)


def reference(op: Op, index: int, size: int, seed: int, hosts: Sequence[int] = ()) -> np.ndarray:
    parts = [combine(op.dtype, [inputs(op, rank, seed)[index]], factor=op.prescale) for rank in range(size)]
    by_host: dict[int, list[np.ndarray]] = {}
    for rank, part in enumerate(parts):
        by_host.setdefault(hosts[rank] if hosts else rank, []).append(part)
    function = np.multiply if op.reduce_op == PRODUCT else np.add
    postscale = op.postscale / size if op.reduce_op == AVERAGE else op.postscale
    return combine(op.dtype, [combine(op.dtype, on, function) for on in by_host.values()], function, postscale)


def rows_of(total: int, size: int, rank: int) -> slice:
    """Earlier ranks get one row more when rows do not divide evenly."""
    base, extra = divmod(total, size)
    begin = rank * base + min(rank, extra)
    return slice(begin, begin + base + (rank < extra))


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


def submit(member: Member, op: Op, arrays: list[np.ndarray]) -> int:
    if op.kind == REDUCESCATTER:
        outputs: list[np.ndarray | None] = [None]
    else:
        outputs = [array if op.in_place else np.empty_like(array) for array in arrays]
    tensors = [
        (a.ctypes.data, 0 if o is None else o.ctypes.data, DTYPES[op.dtype], a.shape)
        for a, o in zip(arrays, outputs, strict=True)
    ]
    handle: int = member.engine.submit(
        op.kind, op.name, tensors, reduce_op=op.reduce_op, prescale=op.prescale, postscale=op.postscale
    )
    member._keep[handle] = (arrays, outputs)
    return handle


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


def check(case: Case, results: Results, where: str, hosts: Sequence[int] = (), first: Results | None = None) -> None:
    """Against the reference; Adasum against what rank 0 had in the `first` run."""
    for op in case.ops:
        for index, shape in enumerate(op.shapes):
            if op.reduce_op == ADASUM:
                expected = (first or results)[0][op.name][index]
            else:
                expected = reference(op, index, case.size, case.seed, hosts)
            for rank, result in enumerate(results):
                want = expected[rows_of(shape[0], case.size, rank)] if op.kind == REDUCESCATTER else expected
                got = np.ascontiguousarray(result[op.name][index])
                assert got.shape == want.shape
                assert got.tobytes() == want.tobytes(), (
                    f"{op} tensor {index} on rank {rank} ({where}) has other bits in elements "
                    f"{np.flatnonzero(got.view(np.uint8) != np.ascontiguousarray(want).view(np.uint8))[:5]}"
                )


@pytest.mark.timeout(300)
@settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
@given(case=cases())
def test_same_world_same_inputs_same_bits(case: Case) -> None:
    for number, transport in enumerate((*TRANSPORTS, "hosts")):
        with EngineWorld(case.size, transport, connections=case.connections, **case.options) as world:
            for turn in range(2):  # first negotiated, then known: they may be fused in other ways
                check(case, run_round(world, case, 10 * number + turn), f"{transport}, turn {turn}", world.hosts)


@pytest.mark.timeout(300)
@settings(
    max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
@given(case=cases(adasum=True), other_threshold=st.sampled_from([0, 5_000, 128 << 20]))
def test_adasum_has_the_same_bits_in_every_run_of_a_world(case: Case, other_threshold: int) -> None:
    """Other neighbours in a batch, another order and another number of threads change nothing; sums come in between."""
    again = replace(
        case, threads=case.threads % 3 + 1, options={**case.options, "fusion_threshold_bytes": other_threshold}
    )
    for transport in (*TRANSPORTS, "hosts"):
        first: Results | None = None
        for number, run in enumerate((case, again)):
            with EngineWorld(run.size, transport, connections=run.connections, **run.options) as world:
                for turn in range(2):
                    results = run_round(world, run, 10 * number + turn)
                    check(run, results, f"{transport}, run {number}, turn {turn}", world.hosts, first)
                    first = first or results


def test_the_reference_depends_on_the_order_of_the_ranks() -> None:
    """Else the test above would prove nothing."""
    op = Op("allreduce.t0", ALLREDUCE, "float32", ((2049,),), SUM, True)
    parts = [inputs(op, rank, 1)[0] for rank in range(3)]
    assert (parts[0] + parts[1] + parts[2]).tobytes() != (parts[2] + parts[1] + parts[0]).tobytes()
    assert reference(op, 0, 3, 1).tobytes() == (parts[0] + parts[1] + parts[2]).tobytes()
    assert reference(op, 0, 3, 1, [0, 1, 0]).tobytes() == (parts[0] + parts[2] + parts[1]).tobytes()
    assert reference(op, 0, 3, 1, [0, 1, 1]).tobytes() == (parts[0] + (parts[1] + parts[2])).tobytes()
    assert reference(op, 0, 3, 1, [0, 1, 1]).tobytes() != reference(op, 0, 3, 1).tobytes()
