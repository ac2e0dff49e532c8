"""Random sequences of mixed operations, from several threads of every rank, against NumPy.

SEQUENCES=1000 plays so many in each world and looks for the shortest that fails; without it a few, always the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import op_cases
import pytest
import sequences
import tiers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sequences import Operation
from torch_fixtures import world_id
from worlds import Keeper

EXAMPLES = int(os.environ.get("SEQUENCES", "0"))
THREADS = 3
SETS: dict[int, list[tuple[int, ...]]] = {
    2: [(0,), (1,)],
    3: [(0, 1), (1, 2), (0, 2)],
    4: [(0, 1), (1, 2, 3), (0, 3), (2,)],
}
ROWS = (0, 1, 2, 5, 16, 700, 20_000)  # the last ones do not fit where small tensors travel


@pytest.fixture(
    scope="module",
    params=tiers.some([(size, transport) for size in SETS for transport in ("shm", "tcp")], 3),
    ids=world_id,
)
def keeper(request: pytest.FixtureRequest) -> Iterator[Keeper]:
    size, transport = request.param
    environment = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    with Keeper(size, transport, environment, lambda world: world.run(sequences.prepare, SETS[size])) as keeper:
        yield keeper


@st.composite
def operation(draw: st.DrawFn, size: int) -> Operation:
    special = ("sparse", "object", "barrier", "mismatch")
    kind = draw(st.sampled_from([*sequences.OPTIONS_OF, *sequences.OPTIONS_OF, *special]))
    members = draw(st.sampled_from([tuple(range(size)), *SETS[size]]))
    given: dict[str, Any] = {"seed": draw(st.integers(0, 3)), "root": draw(st.integers(0, len(members) - 1))}
    if kind == "barrier":
        return Operation(kind, members, sequences.WITHOUT_A_NAME, named=False, **given)
    thread = draw(st.integers(0, THREADS - 1))
    if kind in special:
        if kind == "mismatch" and len(members) == 1:
            kind = "sparse"
        return Operation(kind, members, thread, form="" if kind == "object" else "_async", **given)
    given["named"] = draw(st.integers(0, 3)) > 0
    if not given["named"]:
        thread = sequences.WITHOUT_A_NAME
    groups = kind in sequences.GROUPED and draw(st.booleans())
    dtypes = draw(st.lists(st.sampled_from(op_cases.DTYPES), min_size=1 + groups, max_size=1 + 2 * groups))
    scalar_is_legal = kind in ("allreduce", "broadcast")
    columns = draw(st.sampled_from([(), (3,), (1, 2)]))
    shape = (draw(st.sampled_from(ROWS)), *columns)
    if scalar_is_legal and draw(st.integers(0, 7)) == 0:
        shape = ()
    if "op" in sequences.OPTIONS_OF[kind]:
        legal = ["Sum", "Average"] if kind == "reducescatter" else list(op_cases.REDUCTIONS)
        if "bool" in dtypes:
            legal.remove("Average")
        given["reduce_op"] = draw(st.sampled_from(legal))
        if given["reduce_op"] != "Product" and "bool" not in dtypes:  # a product with factors overflows the small types
            given["factors"] = draw(st.sampled_from(sequences.FACTORS))
    forms = ["", "_async"] + (["_", "_async_"] if kind in sequences.IN_PLACE else [])
    if kind == "alltoall":
        given["uneven"] = draw(st.booleans())
    return Operation(
        kind, members, thread, form=draw(st.sampled_from(forms)), shape=shape, dtypes=tuple(dtypes), **given
    )


@pytest.mark.longer
@pytest.mark.timeout(120 + 2 * EXAMPLES)
@settings(
    phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],  # each step may need another world
    max_examples=EXAMPLES or tiers.pick(10, 40),
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,  # the world has one
    # One world plays all examples: what one leaves behind is what the next one must bear.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)
@given(data=st.data())
def test_any_sequence_from_several_threads(keeper: Keeper, data: st.DataObject) -> None:
    operations = data.draw(st.lists(operation(keeper.size), min_size=6, max_size=40), label="operations")
    seed = data.draw(st.integers(0, 2**16), label="seed of the orders")
    keeper.get().run(sequences.play, operations, THREADS, seed)
