"""A small model with a known gradient, for the tests of DistributedOptimizer on two ranks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any


def linear(seed: int = 0) -> Any:
    import torch

    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2).double()


def distributed_sgd(model: Any, **options: Any) -> Any:
    import torch

    import horovod.torch as hvd

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def rows() -> Any:
    """This rank's input; the mean over the ranks is what training should see."""
    import torch

    import horovod.torch as hvd

    return torch.full((4, 3), 1.0 + hvd.rank(), dtype=torch.float64)


def expected_gradient() -> Any:
    """Of model(rows).sum() with respect to the weight, averaged over ranks 0 and 1."""
    import torch

    return torch.full((2, 3), 4 * 1.5, dtype=torch.float64)


@contextlib.contextmanager
def counted_questions() -> Iterator[Counter[str]]:
    """How often this rank asks who waits for it, by name: a rank that is late makes others ask."""
    from horovod.common.ops.questions import Question

    asked: Counter[str] = Counter()
    ask = Question._ask

    def counting(self: Question, process_set: int, wire: str, quiet: bool) -> None:
        ask(self, process_set, wire, quiet)
        asked[wire] += 1

    Question._ask = counting  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        Question._ask = ask  # type: ignore[method-assign]
