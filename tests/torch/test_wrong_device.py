"""A model that is where its gradients can't be reduced; torch's meta device stands for every such one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from error_codes import ends_with
from event_words import tells
from worlds import World

from horovod.base.errors import OperationCode


def _model() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 3, device="meta"), torch.nn.Linear(2, 2))


def _warned(expect_error: bool, **options: Any) -> list[str]:
    import torch

    import horovod.torch as hvd

    model = _model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
        )
    assert all(one.filename == __file__ for one in caught), "the line of the user's call"
    if expect_error:
        with pytest.raises(
            ValueError, match=ends_with(OperationCode.UNSUPPORTED_DEVICE, "gradient of '1.", "device meta")
        ):
            model[1](torch.ones(1, 2, device="meta")).sum().backward()
        optimizer.load_state_dict(optimizer.state_dict())
    hvd.barrier()
    return [str(one.message) for one in caught]


def test_it_is_told_when_the_optimizer_is_made_and_when_a_gradient_comes(pair: World) -> None:
    for (sentence,) in pair.run(_warned, True):
        assert tells(sentence, "2 of 6", "device meta", "'1.weight', '1.bias'", ".to_empty(device='cpu')")


def test_the_adasum_optimizer_tells_too(pair: World) -> None:
    import horovod.torch as hvd

    for (sentence,) in pair.run(_warned, False, op=hvd.Adasum):
        assert tells(sentence, "2 of 6", "device meta")


def _right() -> int:
    import torch

    import horovod.torch as hvd

    model = _model()
    model[1].requires_grad_(False)  # nothing of it is reduced
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    with pytest.raises(ValueError, match=ends_with(OperationCode.UNSUPPORTED_DEVICE, "'1.bias'", "device meta")):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.barrier()
    return hvd.size()


def test_frozen_parameters_may_be_anywhere_but_not_be_broadcast(pair: World) -> None:
    assert pair.run(_right) == [2, 2]


def test_a_world_of_one_reduces_nothing() -> None:
    import torch

    import horovod.torch as hvd

    hvd.init()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hvd.DistributedOptimizer(torch.optim.SGD(_model().parameters(), lr=0.1))
    finally:
        hvd.shutdown()
