"""Sparse gradients on GPUs that libraries stand in for: the results are those of the CPU, and the host waits for none.

Every dtype, also on real GPUs: sparse_allreduce in test_gpu_op_matrix.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gpu_worlds import standin_world
from worlds import Keeper


@pytest.fixture(scope="module")
def pair() -> Iterator[Keeper]:
    with standin_world(2) as keeper:
        yield keeper


def rows(numbers: list[int], value: float) -> Any:
    import torch

    values = torch.full((len(numbers), 2), value) * torch.arange(1.0, 3.0)
    return torch.sparse_coo_tensor(torch.tensor([numbers]), values, (5, 2), check_invariants=True)


def mine() -> Any:
    """Of two ranks, which both have the first row; one of them has it twice."""
    import horovod.torch as hvd

    return rows([0, 0, 2] if hvd.rank() == 0 else [0, 3, 4, 1], hvd.rank() + 1.0)


def reduce_both_ways(op_name: str) -> list[list[Any]]:
    import fake_gpu

    import horovod.torch as hvd

    def reduce(tensor: Any) -> list[Any]:
        found = hvd.sparse_allreduce_async(tensor, name=f"{op_name}.{tensor.is_cuda}", op=getattr(hvd, op_name))()
        return [found.is_sparse, found.is_cuda, found.size(), found._indices().cpu(), found._values().cpu()]

    return [reduce(mine()), reduce(fake_gpu.on_gpu(mine()))]


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_the_sum_is_that_of_the_cpu(pair: Keeper, op: str) -> None:
    """Entry by entry: duplicates are left, in the order of the ranks."""
    for on_cpu, on_gpu in pair.get().run(reduce_both_ways, op):
        assert (on_cpu[:3], on_gpu[:3]) == ([True, False, (5, 2)], [True, True, (5, 2)])
        assert on_gpu[3].tolist() == on_cpu[3].tolist() == [[0, 0, 2, 0, 3, 4, 1]]
        assert on_gpu[4].tolist() == on_cpu[4].tolist()


def reduce_while_the_device_stands_still() -> list[list[float]]:
    import fake_gpu

    import horovod.torch as hvd

    tensor = fake_gpu.on_gpu(mine())
    fake_gpu.synchronize()
    held = fake_gpu.hold()
    found = hvd.sparse_allreduce_async(tensor, name="held", op=hvd.Average)()
    before = found._values().memory.tolist()
    fake_gpu.release(held)
    after = found._values().cpu().tolist()
    assert before != after  # nothing had happened
    result: list[list[float]] = after
    return result


def test_the_host_does_not_wait_for_the_result(pair: Keeper) -> None:
    wanted = [[0.5, 1.0]] * 3 + [[1.0, 2.0]] * 4
    assert pair.get().run(reduce_while_the_device_stands_still) == [wanted, wanted]


def train(as_dense: bool) -> list[list[Any]]:
    """The gradient and the weights after each of three steps, on the CPU and on the GPU."""
    import fake_gpu
    import torch

    import horovod.torch as hvd

    def steps(place: Callable[[Any], Any]) -> list[Any]:
        weight = torch.nn.Parameter(place(torch.zeros(5, 2)))
        name = f"weight.{as_dense}.{weight.is_cuda}"
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), [(name, weight)], sparse_as_dense=as_dense
        )
        seen = []
        for step in range(3):
            # In the second step rank 0 has no gradient at all.
            weight.grad = None if step == 1 and hvd.rank() == 0 else place(mine())
            optimizer.step()
            assert weight.grad.is_sparse
            assert weight.grad.is_cuda == weight.is_cuda
            seen += [weight.grad.to_dense().cpu().tolist(), weight.detach().cpu().tolist()]
        return seen

    return [steps(lambda tensor: tensor), steps(fake_gpu.on_gpu)]


@pytest.mark.parametrize("as_dense", [False, True])
def test_an_optimizer_s_sparse_gradients_are_those_of_the_cpu(pair: Keeper, as_dense: bool) -> None:
    for on_cpu, on_gpu in pair.get().run(train, as_dense):
        assert on_gpu == on_cpu
        assert on_cpu[0][:3] == [[2.0, 4.0], [1.0, 2.0], [0.5, 1.0]]
        assert on_cpu[2][:3] == [[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]]
