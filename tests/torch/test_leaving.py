"""Processes of elastic jobs that get SIGTERM: they leave at the next commit, and the others lose no step."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import tiers
from test_changing_worlds import BATCHES, ROWS, _alone, _elastic, _model_and_rows

LEAVES_AT = 5
WAITS_AT = 8  # until those that leave are gone
COMMIT_EVERY = 2


def _leave_by_a_handler_of_the_program() -> None:
    import horovod.torch as hvd

    signal.signal(signal.SIGTERM, lambda *_: hvd.elastic.leave_at_next_commit("its instance is reclaimed"))


def _train(leavers: list[int], has_handler: bool = False) -> dict[str, Any]:
    """With batches of 12 rows that an ElasticSampler deals out, so that the weights become those of one process."""
    import torch

    import horovod.torch as hvd

    if has_handler:
        _leave_by_a_handler_of_the_program()
    hvd.init()
    first_rank, smallest = hvd.rank(), hvd.size() - len(leavers)
    model, batches = _model_and_rows()
    rows = batches.reshape(-1, batches.shape[-1])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    sampler = hvd.elastic.ElasticSampler(rows, shuffle=False)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0)
    seen: list[int] = []  # not in the state: a step that is taken twice is seen twice
    sizes = [hvd.size()]
    restored: list[int] = []
    state.register_reset_callbacks([lambda: sizes.append(hvd.size())])
    restore = state.restore
    state.restore = lambda: (restored.append(state.batch), restore())

    @hvd.elastic.run
    def train(state: Any) -> None:
        indices = iter(sampler)
        count = ROWS // hvd.size()
        while state.batch < BATCHES:
            while state.batch == WAITS_AT and hvd.size() > smallest:
                time.sleep(0.01)  # training takes its time meanwhile
                state.check_host_updates()
            optimizer.zero_grad()
            share = rows[[next(indices) for _ in range(count)]]
            model(share).square().mean().backward()
            if state.batch == LEAVES_AT and first_rank in leavers:
                os.kill(os.getpid(), signal.SIGTERM)  # while gradients are reduced
            optimizer.step()
            seen.append(state.batch)
            sampler.record_batch(state.batch, count)
            state.batch += 1
            if state.batch % COMMIT_EVERY == 0:
                state.commit()

    train(state)
    weights = [parameter.tolist() for parameter in model.parameters()]
    is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return {"weights": weights, "sizes": sizes, "seen": seen, "restored": restored, "is_default": is_default}


@pytest.mark.longer
@pytest.mark.parametrize(
    ("size", "leavers", "transport", "has_handler"),
    tiers.some(
        [
            *((3, [0], "shm", False), (3, [2], "tcp", False), (4, [0, 1], "hosts", False)),
            *((4, [3], "shm", True), (3, [0], "tcp", False), (3, [0, 1, 2], "shm", False)),
        ],
        2,
    ),
)
def test_the_others_lose_no_step(size: int, leavers: list[int], transport: str, has_handler: bool) -> None:
    with _elastic(size, transport) as world:
        outcomes = world.outcomes(_train, leavers, has_handler)
    for rank, outcome in enumerate(outcomes):
        assert outcome.text == ""
        if rank in leavers:
            assert outcome.exit_code == 128 + signal.SIGTERM
            continue
        assert outcome.value["seen"] == list(range(BATCHES))
        assert outcome.value["restored"] == []
        assert outcome.value["sizes"][0] == size
        assert outcome.value["sizes"][-1] == size - len(leavers)
        assert outcome.value["is_default"] is not has_handler
        for ours, expected in zip(outcome.value["weights"], _alone(), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-9)
