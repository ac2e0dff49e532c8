"""Training with two ranks on GPUs that libraries stand in for: who waits for whom, and what many worlds leave.

Nothing here looks at a clock. A held stream stands still until it is released, so what happens meanwhile does not
depend on it; a stream that comes to its end, or a call that raises, is the event that a test waits for.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import tiers
from error_codes import ends_with
from event_words import SAME_GRADIENTS
from gpu_worlds import standin_world
from worlds import Keeper

from horovod.base.errors import EngineCode

SHAPE = (3000, 100)  # more than a megabyte: handed over by the hook itself
NAMES = ("communicators", "operations", "streams", "events", "contexts", "blocks")


@pytest.fixture(scope="module")
def pair() -> Iterator[Keeper]:
    with standin_world(2) as keeper:
        yield keeper


# -- overlap -----------------------------------------------------------------------------------------------------------
class Model:
    """Two layers. The second one's gradient comes first; `between` runs before that of the first is queued."""

    def __init__(self) -> None:
        import torch
        from fake_gpu import on_gpu

        import horovod.torch as hvd

        self.first, self.second = (torch.nn.Parameter(torch.zeros(SHAPE)) for _ in range(2))
        named = [("first", self.first), ("second", self.second)]
        for _, parameter in named:
            parameter.grad = on_gpu(torch.zeros(SHAPE))  # backward adds to it, in the order of the stream
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=1.0), named)

    def backward(self, between: Any = lambda: None, same: bool = False) -> None:
        """With `same` all ranks compute the same."""
        import torch

        import horovod.torch as hvd

        class Between(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                between()
                return gradient

        scale = 1.5 if same else float(hvd.rank() + 1)
        ((Between.apply(self.first * 10.0 * scale)) + self.second * scale).sum().backward()

    def state(self) -> list[float]:
        """What is in memory now: gradients and parameters of the first layer and of the second."""
        tensors = (self.first.grad.memory, self.second.grad.memory, self.first, self.second)
        assert all(bool((one == one[0, 0]).all()) for one in tensors)
        return [float(one[0, 0]) for one in tensors]


def step_while_the_device_stands_still() -> list[list[float]]:
    import fake_gpu

    model = Model()
    model.backward()
    model.optimizer.step()  # the names are agreed on
    fake_gpu.synchronize()
    states = [model.state()]
    held = fake_gpu.hold()
    model.optimizer.zero_grad(set_to_none=False)
    model.backward()
    model.optimizer.synchronize()
    with model.optimizer.skip_synchronize():
        model.optimizer.step()
    states.append(model.state())
    fake_gpu.release(held)
    fake_gpu.synchronize()
    states.append(model.state())
    return states


def test_the_host_returns_from_a_step_that_the_device_has_not_begun(pair: Keeper) -> None:
    """backward(), synchronize() and step() only queue; then everything happens in the order of the stream."""
    after_one = [15.0, 1.5, -15.0, -1.5]
    for before, held, after in pair.get().run(step_while_the_device_stands_still):
        assert before == held == after_one
        assert after == [15.0, 1.5, -30.0, -3.0]


def reduce_during_the_backward_pass() -> dict[str, list[float]]:
    import fake_gpu
    import torch

    import horovod.torch as hvd

    model = Model()
    model.backward()
    model.optimizer.step()
    model.optimizer.zero_grad(set_to_none=False)
    fake_gpu.synchronize()
    seen, held = {}, []

    def between() -> None:
        held.append(fake_gpu.hold())
        own, fake_gpu.stream = fake_gpu.stream, fake_gpu.new_stream()
        # What the engine queued before this one has passed when this one has.
        hvd.allreduce_(fake_gpu.on_gpu(torch.ones(1)), name="marker")
        fake_gpu.synchronize()
        seen["between"] = model.state()
        fake_gpu.stream = own

    model.backward(between)
    model.optimizer.step()
    seen["held"] = model.state()
    fake_gpu.release(held[0])
    fake_gpu.synchronize()
    seen["after"] = model.state()
    return seen


def test_gradients_are_reduced_while_the_backward_pass_goes_on(pair: Keeper) -> None:
    """The second layer's is there before the stream has come to the first layer's."""
    for seen in pair.get().run(reduce_during_the_backward_pass):
        assert seen["between"] == seen["held"] == [0.0, 1.5, -15.0, -1.5]
        assert seen["after"] == [15.0, 1.5, -30.0, -3.0]


def compare_while_the_device_stands_still(same: bool) -> list[list[str]]:
    """What was told while the device had not come to the first steps, when it had, and later."""
    import fake_gpu

    model = Model()

    def warned(steps: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(steps):
                model.optimizer.zero_grad(set_to_none=False)
                model.backward(same=same)
                model.optimizer.step()
        return [str(one.message) for one in caught]

    told = [warned(1)]
    held = fake_gpu.hold()
    told.append(warned(4))
    fake_gpu.release(held)
    fake_gpu.synchronize()
    return [*told, warned(1), warned(3)]


@pytest.mark.parametrize("same", [True, False])
def test_gradients_are_compared_without_the_host(pair: Keeper, same: bool) -> None:
    """A forgotten DistributedSampler is told in the first step after the device has come so far."""
    on_0, on_1 = pair.get().run(compare_while_the_device_stands_still, same)
    assert [len(told) for told in on_0] == ([0, 0, 1, 0] if same else [0, 0, 0, 0])
    assert not same or SAME_GRADIENTS in on_0[2][0]
    assert on_1 == [[], [], [], []]


def gradient_of_a_broadcast() -> list[float]:
    import fake_gpu
    import torch

    import horovod.torch as hvd

    x = fake_gpu.on_gpu(torch.ones(2)).requires_grad_()
    hvd.broadcast(x, root_rank=1).backward(fake_gpu.on_gpu(torch.full((2,), 2.0 + hvd.rank())))
    gradient: list[float] = x.grad.cpu().tolist()
    return gradient


def test_the_gradient_of_a_broadcast_stays_on_the_device(pair: Keeper) -> None:
    assert pair.get().run(gradient_of_a_broadcast) == [[0.0, 0.0], [2.5, 2.5]]


def normalize_while_the_device_stands_still() -> list[list[Any]]:
    """Output, gradient and running statistics: on the CPU, then on the GPU."""
    import fake_gpu
    import torch

    import horovod.torch as hvd

    values = torch.arange(24.0).reshape(4, 3, 2).square() * (hvd.rank() + 1)
    slope = torch.arange(24.0).reshape(4, 3, 2).sin()

    def normalize(batch: torch.Tensor, slope: torch.Tensor) -> list[Any]:
        layer = hvd.SyncBatchNorm(3)
        batch.requires_grad_()
        output = layer(batch)
        output.backward(slope)
        return [output.detach(), batch.grad, layer.running_mean, layer.running_var]

    on_cpu = normalize(values.clone(), slope)
    normalize(fake_gpu.on_gpu(values), fake_gpu.on_gpu(slope))  # the names are agreed on
    held = fake_gpu.hold()
    on_gpu = normalize(fake_gpu.on_gpu(values), fake_gpu.on_gpu(slope))
    fake_gpu.release(held)
    fake_gpu.synchronize()
    return [[one.cpu().tolist() for one in results] for results in (on_cpu, on_gpu)]


def test_batches_are_normalized_without_the_host(pair: Keeper) -> None:
    for on_cpu, on_gpu in pair.get().run(normalize_while_the_device_stands_still):
        assert on_gpu == on_cpu


# -- the end -----------------------------------------------------------------------------------------------------------
def cycles(number: int) -> tuple[dict[str, int], dict[str, int]]:
    """Leaves the world and joins it again, every second time after a failure on rank 0."""
    import gc
    import threading

    import fake_gpu
    import torch

    import horovod.torch as hvd

    def counts() -> dict[str, int]:
        gc.collect()
        return {name: fake_gpu.count(name) for name in NAMES}

    def repeat(x: torch.Tensor) -> None:
        for _ in range(3):  # the first one fails on one rank only
            hvd.allreduce_(x)

    def cycle(badly: bool) -> None:
        x = fake_gpu.on_gpu(torch.ones(1000))
        hvd.allreduce_(x, op=hvd.Average, prescale_factor=0.5)
        hvd.allgather(x)
        hvd.reducescatter(x, op=hvd.Sum)
        if badly:
            if hvd.rank() == 0:
                fake_gpu.fail("ncclGroupEnd", 1)
            with pytest.raises(hvd.HorovodInternalError, match=ends_with(EngineCode.NCCL_FAILED, "ncclGroupEnd")):
                repeat(x)
        fake_gpu.synchronize()
        hvd.shutdown()
        hvd.init()

    cycle(True)
    cycle(False)
    before = counts()
    for step in range(number):
        cycle(step % 2 == 0)
    for _ in range(400):  # a stream that was destroyed works off what is queued there, and tells nobody
        now = counts()
        if all(now[name] <= before[name] for name in NAMES):
            break
        threading.Event().wait(0.05)
    return before, now


@pytest.mark.longer
def test_resets_leave_nothing_on_the_device(pair: Keeper) -> None:
    number = tiers.pick(6, 20)
    for before, now in pair.get().run(cycles, number):
        more = {name: (before[name], now[name]) for name in NAMES if now[name] > before[name]}
        assert not more, more
