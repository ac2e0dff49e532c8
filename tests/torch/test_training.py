"""Training with N ranks is training: it equals one process on the joined batch, and two runs agree to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
from worlds import World

STEPS = 12
ROWS_PER_RANK = 6


def _model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(7)
    layers = [nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double()


def _batches(size: int) -> list[tuple[Any, Any]]:
    """One joined batch a step; rank r works on rows [r * ROWS_PER_RANK, (r + 1) * ROWS_PER_RANK)."""
    import torch

    generator = torch.Generator().manual_seed(3)
    rows = size * ROWS_PER_RANK
    return [
        (
            torch.randn(rows, 5, dtype=torch.float64, generator=generator),
            torch.randn(rows, 3, dtype=torch.float64, generator=generator),
        )
        for _ in range(STEPS)
    ]


def _optimizer(name: str, parameters: Any) -> Any:
    import torch

    if name == "SGD":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01)


def train_alone(name: str, size: int, passes: int = 1) -> list[list[float]]:
    """The joined batch in one process, without Horovod. Returns all weights."""
    import torch.nn.functional as F

    model = _model()
    optimizer = _optimizer(name, model.parameters())
    for step, (x, y) in enumerate(_batches(size)):
        F.mse_loss(model(x), y).backward()
        if (step + 1) % passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def train_distributed(name: str, passes: int = 1, handover_bytes: int = 1 << 20, **options: Any) -> list[list[float]]:
    """This rank's share of every batch. Returns all weights."""
    import torch
    import torch.nn.functional as F

    import horovod.torch as hvd
    from horovod.common.ops import buckets

    buckets.HANDOVER_BYTES = handover_bytes  # type: ignore[misc]
    model = _model()
    if hvd.rank() != 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(hvd.rank())  # what broadcast_parameters must mend
    if options.pop("list_groups", False):
        weights = list(model.parameters())
        options["groups"] = [weights[4:], weights[1:3]]
    optimizer = _optimizer(name, model.parameters())
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes, **options
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    own = slice(hvd.rank() * ROWS_PER_RANK, (hvd.rank() + 1) * ROWS_PER_RANK)
    for step, (x, y) in enumerate(_batches(hvd.size())):
        F.mse_loss(model(x[own]), y[own]).backward()
        if (step + 1) % passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def _assert_equal_training(world: World, name: str, passes: int = 1, tolerance: float = 1e-10, **options: Any) -> None:
    expected = train_alone(name, world.size, passes)
    for weights in world.run(train_distributed, name, passes, **options):
        for found, wanted in zip(weights, expected, strict=True):
            assert found == pytest.approx(wanted, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_equals_one_process_on_the_joined_batch(world: World, name: str) -> None:
    _assert_equal_training(world, name)


@pytest.mark.parametrize(
    "options",
    [
        {"passes": 3},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"groups": 100},
        {"list_groups": True, "passes": 2},
        {"groups": 2, "gradient_predivide_factor": 4.0},
        {"handover_bytes": 0},
    ],
    ids=str,
)
def test_options_do_not_change_the_result(pair: World, options: dict[str, Any]) -> None:
    _assert_equal_training(pair, "SGD", **options)


def test_half_precision_on_the_wire_is_close(pair: World) -> None:
    expected = train_alone("SGD", 2)
    exact = pair.run(train_distributed, "SGD")[0]
    for compression in ("fp16", "bf16"):
        found = pair.run(_train_compressed, compression)
        assert found[0] == found[1]
        assert found[0] != exact
        for weights, wanted in zip(found[0], expected, strict=True):
            assert weights == pytest.approx(wanted, rel=0.05, abs=0.05)


def _train_compressed(compression: str) -> list[list[float]]:
    import horovod.torch as hvd

    return train_distributed("SGD", compression=getattr(hvd.Compression, compression))


def test_two_runs_agree_to_the_last_bit(world: World) -> None:
    first = world.run(train_distributed, "SGD")
    # Other batching, other timing: the order of summation must not depend on them.
    again = world.run(train_distributed, "SGD", 1, 0)
    assert all(weights == first[0] for weights in first + again)


def _announced() -> dict[str, int]:
    from horovod.worker.runtime.context import current

    return {name: count for name, count in current().counters().items() if "announce" in name}


def _announced_in_steps() -> list[dict[str, int]]:
    import torch

    import horovod.torch as hvd

    model = _model()
    optimizer = hvd.DistributedOptimizer(_optimizer("SGD", model.parameters()), model.named_parameters())
    counts = []
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        hvd.allgather(torch.ones(1 + hvd.rank()), name="rows")
        hvd.broadcast(torch.ones(3), 1, name="weights")
        counts.append(_announced())
    return counts


def test_only_the_first_step_asks_the_coordinator(world: World) -> None:
    for counts in world.run(_announced_in_steps):
        first, *others = counts
        assert first["operations_announced"] > 0
        assert first["announcement_messages_sent"] > 0
        assert all(other == first for other in others)


def _announced_unnamed() -> list[dict[str, int]]:
    import torch

    import horovod.torch as hvd

    counts = []
    for _ in range(3):
        for _ in range(64):
            hvd.allreduce_(torch.ones(3))
            hvd.barrier()
        counts.append(_announced())
    return counts


def test_unnamed_operations_are_agreed_on_for_good_as_well(pair: World) -> None:
    for first, *others in pair.run(_announced_unnamed):
        assert all(other == first for other in others)
