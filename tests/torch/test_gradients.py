"""Gradients of the collectives as the table of the API says, on real ranks; also through a double backward."""

from __future__ import annotations

from typing import Any

import pytest
from worlds import World


def _weights(rank: int, shape: tuple[int, ...]) -> Any:
    """The gradient that arrives at the result on `rank`: different on every rank and for every element."""
    import torch

    return torch.arange(1, 1 + int(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape) * (rank + 1)


def _backward(result: Any) -> Any:
    import horovod.torch as hvd

    weights = _weights(hvd.rank(), result.shape)
    (result * weights).sum().backward()
    return weights


def _allreduce(op: str, prescale: float, postscale: float, grouped: bool) -> None:
    import torch

    import horovod.torch as hvd

    tensor = torch.full((2, 3), 2.0 + hvd.rank(), dtype=torch.float64, requires_grad=True)
    arguments: dict[str, Any] = {"prescale_factor": prescale, "postscale_factor": postscale, "op": getattr(hvd, op)}
    if grouped:
        other = torch.ones(3, dtype=torch.float32, requires_grad=True)
        result, _ = hvd.grouped_allreduce([tensor, other], name="g", **arguments)
    else:
        result = hvd.allreduce(tensor, name="g", **arguments)
    _backward(result)
    total = sum(_weights(r, (2, 3)) for r in range(hvd.size()))
    expected = total * prescale * postscale / (hvd.size() if op == "Average" else 1)
    torch.testing.assert_close(tensor.grad, expected, rtol=1e-12, atol=0)
    if grouped:
        torch.testing.assert_close(other.grad, torch.zeros(3))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("op", "prescale", "postscale"), [("Average", 1, 1), ("Sum", 1, 1), ("Average", 0.5, 3.0)])
def test_allreduce(world: World, op: str, prescale: float, postscale: float, grouped: bool) -> None:
    world.run(_allreduce, op, prescale, postscale, grouped)


def _compressed() -> None:
    import torch

    import horovod.torch as hvd

    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        tensor = torch.full((4,), 1.5 + hvd.rank(), requires_grad=True)
        result = hvd.allreduce(tensor, compression=compression, op=hvd.Sum)
        assert result.dtype == torch.float32
        result.sum().backward()
        torch.testing.assert_close(tensor.grad, torch.full((4,), float(hvd.size())))


def test_allreduce_with_compression(pair: World) -> None:
    pair.run(_compressed)


def _allgather(grouped: bool) -> None:
    import torch

    import horovod.torch as hvd

    rank, size = hvd.rank(), hvd.size()
    tensor = torch.ones((rank + 1, 2), dtype=torch.float64, requires_grad=True)
    result = hvd.grouped_allgather([tensor, tensor])[1] if grouped else hvd.allgather(tensor, name="g")
    _backward(result)
    rows = sum(range(1, size + 1))
    average = sum(_weights(r, (rows, 2)) for r in range(size)) / size
    first = sum(range(1, rank + 1))
    torch.testing.assert_close(tensor.grad, average[first : first + rank + 1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("grouped", [False, True])
def test_allgather_averages_and_takes_own_rows(world: World, grouped: bool) -> None:
    world.run(_allgather, grouped)


def _broadcast() -> None:
    import torch

    import horovod.torch as hvd

    size = hvd.size()
    for root in range(size):
        tensor = torch.ones(3, dtype=torch.float64, requires_grad=True)
        _backward(hvd.broadcast(tensor, root))
        average = sum(_weights(r, (3,)) for r in range(size)) / size
        torch.testing.assert_close(tensor.grad, average if hvd.rank() == root else torch.zeros_like(average))


def test_broadcast_gives_the_average_to_the_root(world: World) -> None:
    world.run(_broadcast)


def _alltoall(with_splits: bool) -> None:
    import torch

    import horovod.torch as hvd

    rank, size = hvd.rank(), hvd.size()
    splits = [(rank + r) % 2 for r in range(size)] if with_splits else None
    rows = 2 * size
    tensor = torch.ones((rows, 2), dtype=torch.float64, requires_grad=True)
    result = hvd.alltoall(tensor, splits)
    if with_splits:
        result = result[0]
    # Each receiver weighs everything by its own rank + 1, so that number must come back to the rows it got.
    (result * (rank + 1)).sum().backward()
    sent = splits or [2] * size
    expected = [r + 1 for r in range(size) for _ in range(sent[r])]
    expected += [0] * (rows - len(expected))
    torch.testing.assert_close(tensor.grad, torch.tensor(expected, dtype=torch.float64)[:, None].expand(rows, 2))


@pytest.mark.parametrize("with_splits", [False, True])
def test_alltoall_sends_gradients_back(world: World, with_splits: bool) -> None:
    world.run(_alltoall, with_splits)


def _reducescatter(op: str, grouped: bool) -> None:
    import torch

    import horovod.torch as hvd

    rank, size = hvd.rank(), hvd.size()
    rows = 2 * size + 1
    tensor = torch.ones((rows, 2), dtype=torch.float64, requires_grad=True)
    arguments: dict[str, Any] = {"op": getattr(hvd, op), "prescale_factor": 0.5, "postscale_factor": 3.0}
    if grouped:
        result = hvd.grouped_reducescatter([tensor, torch.ones(1)], **arguments)[0]
    else:
        result = hvd.reducescatter(tensor, **arguments)
    result.sum().backward()  # an expanded gradient, which must not be written to
    assert result.shape[0] == rows // size + (rank < rows % size)
    expected = 1.5 * (size if op == "Sum" else 1)
    torch.testing.assert_close(tensor.grad, torch.full_like(tensor, expected))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_reducescatter(world: World, op: str, grouped: bool) -> None:
    world.run(_reducescatter, op, grouped)


def _double_backward() -> None:
    import torch

    import horovod.torch as hvd

    size = hvd.size()
    for collective in (
        lambda t: hvd.allreduce(t, op=hvd.Sum),
        lambda t: hvd.broadcast(t, 1),
        hvd.allgather,
        hvd.alltoall,
        lambda t: hvd.reducescatter(t, op=hvd.Sum),
    ):
        tensor = torch.arange(1.0, 2 * size + 1, dtype=torch.float64, requires_grad=True)
        result = collective(tensor**2)
        (gradient,) = torch.autograd.grad((result**2).sum(), tensor, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), tensor)
        assert second.shape == tensor.shape
        assert bool(torch.isfinite(second).all())
    # With x on each of n ranks, y = n x^2, and d(y^2)/dx = n (sum over the ranks) * 2 y * 2 x = 4 n^2 x^3.
    tensor = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad((hvd.allreduce(tensor**2, op=hvd.Sum) ** 2).sum(), tensor, create_graph=True)
    torch.testing.assert_close(gradient.detach(), torch.tensor([4.0 * 27 * size**2], dtype=torch.float64))


def test_double_backward(pair: World) -> None:
    pair.run(_double_backward)
