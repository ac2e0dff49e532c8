"""Models and steps under torch.compile train like the plain ones, with gradients reduced in the backward pass.

tests/extended/torch/test_compiled_steps.py has the backend "inductor", and more optimizers.
"""

from __future__ import annotations

from typing import Any

import compiled_steps
import pytest
import tiers
from optimizer_model import counted_questions
from worlds import World

STEPS = 3


def _train(compiled: str, **options: Any) -> tuple[list[list[float]], int]:
    """This rank's share of each batch. Returns the weights, and how many reductions a step submitted."""
    import torch
    from torch import nn

    import horovod.torch as hvd
    from horovod.worker.runtime.context import current

    torch._dynamo.reset()
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    model: Any = plain
    if compiled == "model":
        model = torch.compile(plain, backend="aot_eager")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters(), **options
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    generator = torch.Generator().manual_seed(hvd.rank())
    passes = options.get("backward_passes_per_step", 1)
    before = current().counters()["submitted"]
    with counted_questions() as asked:
        for _ in range(STEPS):
            optimizer.zero_grad()
            for _ in range(passes):
                x = torch.randn(6, 4, dtype=torch.float64, generator=generator)
                if compiled == "compiled autograd":
                    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
                        model(x).square().sum().backward()
                else:
                    model(x).square().sum().backward()
            optimizer.step()
    submitted = (current().counters()["submitted"] - before - asked.total()) // STEPS
    return [parameter.flatten().tolist() for parameter in plain.parameters()], submitted


CASES: list[tuple[str, dict[str, int]]] = [
    ("model", {}),
    ("model", {"groups": 2}),
    ("model", {"backward_passes_per_step": 2}),
    ("compiled autograd", {"groups": 2}),
]


@pytest.mark.longer
@pytest.mark.parametrize(("compiled", "options"), tiers.some(CASES, 2), ids=str)
def test_equals_the_plain_model(pair: World, compiled: str, options: dict[str, int]) -> None:
    expected = pair.run(_train, "no", **options)
    found = pair.run(_train, compiled, **options)
    assert found[0] == found[1]
    assert found[0][1] == expected[0][1], "every gradient is reduced once a step"
    for weights, wanted in zip(found[0][0], expected[0][0], strict=True):
        assert weights == pytest.approx(wanted, rel=1e-12, abs=1e-12)


STEP_CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("whole", "aot_eager", {}),
    ("whole", "aot_eager", {"traced_backward": True}),
    ("optimizer", "aot_eager", {}),
    ("whole", "eager", {"marked": True}),
]


@pytest.mark.longer
@pytest.mark.parametrize(("compiled", "backend", "options"), tiers.some(STEP_CASES, 2), ids=str)
def test_compiled_steps_equal_plain_ones(pair: World, compiled: str, backend: str, options: dict[str, Any]) -> None:
    compiled_steps.check(pair, compiled, backend, **options)


def _in_one_graph() -> str:
    import torch
    from optimizer_model import distributed_sgd, linear, rows

    model = linear()
    optimizer = distributed_sgd(model)

    @torch.compile(fullgraph=True, backend="eager")
    def step(x: Any) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    try:
        step(rows())
    except torch._dynamo.exc.Unsupported as refusal:
        return str(refusal)
    return "no error"


def test_torch_refuses_a_whole_step_in_one_graph(pair: World) -> None:
    for sentence in pair.run(_in_one_graph):
        assert "zero_grad" in sentence
