"""Gradients against difference quotients, in float64: of every differentiable call, named or not, in sets and groups.

All ranks together compute one number, the sum over the ranks of <weights of the rank, result of the rank>. Moving one
rank's input in a random direction moves that number by the true derivative. The table of the API differs from it by a
constant factor for some operations: Horovod averages the losses of the ranks where the true derivative would add them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from worlds import World

STEP = 0.5  # all calls are linear in their input, so the quotient is exact
SCALED = {"prescale_factor": 0.5, "postscale_factor": 3.0}

# What the gradient is, times the true derivative, with n members.
FACTORS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 1.0,
    "allgather": lambda n: 1.0 / n,
    "broadcast": lambda n: 1.0 / n,
    "alltoall": lambda n: 1.0,
    "reducescatter": float,
}


def _calls(size: int, position: int, options: dict[str, Any]) -> Iterator[tuple[str, int, Callable[[Any], Any]]]:
    """Operation, rows of this rank's input, and the call under test: a matrix of two columns to a list of results."""
    import horovod.torch as hvd

    members = (options["process_set"].ranks if "process_set" in options else None) or list(range(hvd.size()))
    rows = position + 1
    for op in (hvd.Average, hvd.Sum):
        for factors in ({}, SCALED):
            given = {"op": op, **factors, **options}
            yield "allreduce", 3, lambda x, o=given: [hvd.allreduce(x, **o)]
            yield "allreduce", 3, lambda x, o=given: hvd.grouped_allreduce([x, x[1:].contiguous() * 2], **o)
            yield "reducescatter", size + 1, lambda x, o=given: [hvd.reducescatter(x, **o)]
            yield "reducescatter", size + 1, lambda x, o=given: hvd.grouped_reducescatter([x, x * 2], **o)
    yield "allgather", rows, lambda x: [hvd.allgather(x, **options)]
    yield "allgather", rows, lambda x: hvd.grouped_allgather([x, x * 2], **options)
    yield "allgather", position, lambda x: [hvd.allgather(x, **options)]  # the first has no rows
    for root in members:
        yield "broadcast", 2, lambda x, r=root: [hvd.broadcast(x, r, **options)]
    yield "alltoall", 2 * size, lambda x: [hvd.alltoall(x, **options)]
    splits = [(position + other) % 3 for other in range(size)]
    unsent = sum(splits) + 1
    yield "alltoall", unsent, lambda x: [hvd.alltoall(x, splits, **options)[0]]


def _compare(ranks: list[int] | None, name: str | None) -> int:
    """Checks every call; the number of derivatives that this rank compared."""
    import torch

    import horovod.torch as hvd

    options: dict[str, Any] = {} if name is None else {"name": name}
    if ranks is not None:
        options["process_set"] = hvd.add_process_set(ranks)
        if not options["process_set"].included():
            hvd.remove_process_set(options["process_set"])
            return 0
    members = ranks or list(range(hvd.size()))
    size, position = len(members), members.index(hvd.rank())
    inside = {"process_set": options["process_set"]} if ranks is not None else {}
    compared = 0
    for operation, rows, call in _calls(size, position, options):
        generator = torch.Generator().manual_seed(position)
        x = torch.rand(rows, 2, dtype=torch.float64, generator=generator, requires_grad=True)
        weights = [torch.rand(y.shape, dtype=torch.float64, generator=generator) for y in call(x.detach())]

        def loss(x: Any) -> Any:
            return sum((w * y).sum() for w, y in zip(weights, call(x), strict=True))  # noqa: B023

        loss(x).backward()
        for member in range(size):
            direction = torch.rand(x.shape, dtype=torch.float64, generator=generator) * (member == position)
            total = [hvd.allreduce(loss(x.detach() + step * direction), op=hvd.Sum, **inside) for step in (STEP, -STEP)]
            if member == position and x.numel():
                true = (total[0] - total[1]) / (2 * STEP)
                found = (x.grad * direction).sum()
                torch.testing.assert_close(found, true * FACTORS[operation](size), rtol=1e-9, atol=1e-9)
                compared += 1
    if ranks is not None:
        hvd.remove_process_set(options["process_set"])
    return compared


def test_of_all_ranks(world: World) -> None:
    assert min(world.run(_compare, None, None)) > 20


def test_with_names(pair: World) -> None:
    assert min(pair.run(_compare, None, "named")) > 20


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_of_a_process_set(transport: str) -> None:
    with World(3, transport, {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}) as world:
        first, outside, last = world.run(_compare, [0, 2], "in the set")
    assert outside == 0
    assert min(first, last) > 20


def _torch_gradcheck() -> None:
    import torch

    import horovod.torch as hvd

    tensor = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    # gradcheck moves the same element on all ranks at the same time. Ranks with equal inputs then are one process that
    # computes an average, a sum of equal parts, or a row of its own.
    for call in (
        hvd.allreduce,
        lambda t: hvd.allreduce(t, prescale_factor=0.5, postscale_factor=4.0),
        lambda t: hvd.allreduce(t, op=hvd.Sum),
        lambda t: tuple(hvd.grouped_allreduce([t, 2 * t], op=hvd.Sum)),
    ):
        assert torch.autograd.gradcheck(call, tensor)
        assert torch.autograd.gradgradcheck(call, tensor)


def test_torch_gradcheck(pair: World) -> None:
    pair.run(_torch_gradcheck)
