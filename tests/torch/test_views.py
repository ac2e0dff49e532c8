"""Tensors whose memory does not hold their values one after another: strided, negative, conjugate and complex ones.

Every operation gets the values that PyTorch shows, in place and not; what is in place keeps its strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_codes import ends_with
from worlds import World

import horovod.torch as hvd
from horovod.base.errors import OperationCode

KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.clone().t(),
    "sliced": lambda x: torch.stack([x, x], 2)[:, :, 1],
    "channels last": lambda x: x.repeat(2, 3, 1, 1).contiguous(memory_format=torch.channels_last),
    "negative": lambda x: torch._neg_view(-x),
    "negative, one element": lambda x: torch.complex(torch.zeros(1), -x[0, :1].float()).conj().imag,
    "imaginary part of a conjugate": lambda x: torch.complex(x * 0, -x).conj().imag,
    "complex": lambda x: torch.complex(x, x * 2 + 1),
    "conjugate": lambda x: torch.complex(x, x * 2 + 1).conj(),
    "complex, transposed": lambda x: torch.complex(x, x * 2 + 1).t(),
    "complex128": lambda x: torch.complex(x.double(), x.double() + 1),
}


def _values(kind: str, rank: int) -> torch.Tensor:
    return KINDS[kind](torch.arange(16.0).view(4, 4) + 10.0 * rank - 7)


def _same(found: Any, expected: torch.Tensor, what: str) -> None:
    assert found.dtype == expected.dtype, what
    assert torch.equal(found, expected.resolve_conj().resolve_neg()), f"{what}: {found}, not {expected}"


def _operations(kind: str) -> None:
    rank, size = hvd.rank(), hvd.size()
    everybody = [_values(kind, r) for r in range(size)]
    own = everybody[rank]
    total = sum(x.resolve_conj() for x in everybody)
    average = total / size

    def copy() -> torch.Tensor:
        return _values(kind, rank)

    def same(found: Any, expected: torch.Tensor, what: str) -> None:
        _same(found, expected, f"{kind}, {what}")

    same(hvd.allreduce(own, op=hvd.Sum, name="v"), total, "allreduce")
    same(hvd.allreduce(own, name="v"), average, "average")
    same(hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0, name="v"), total * 2, "factors")
    same(hvd.synchronize(hvd.allreduce_async(own, op=hvd.Sum)), total, "allreduce_async")
    same(hvd.allreduce(own, op=hvd.Sum, compression=hvd.Compression.fp16), total, "compressed")
    same(own, _values(kind, rank), "the input must not change")
    for in_place in (
        lambda x: hvd.allreduce_(x, op=hvd.Sum),
        lambda x: hvd.allreduce_(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
        lambda x: hvd.synchronize(hvd.allreduce_async_(x, op=hvd.Sum)),
        lambda x: hvd.grouped_allreduce_([x, torch.ones(1)], op=hvd.Sum)[0],
        lambda x: hvd.synchronize(hvd.grouped_allreduce_async_([torch.ones(1), x], op=hvd.Sum))[1],
    ):
        x = copy()
        strides = x.stride()
        assert in_place(x) is x
        same(x, total, "in place")
        assert x.stride() == strides
    same(hvd.grouped_allreduce([own, torch.ones(1)], op=hvd.Sum)[0], total, "grouped_allreduce")
    handle = hvd.grouped_allreduce_async([own, own], op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    same(hvd.synchronize(handle)[1], total, "grouped_allreduce_async")
    assert hvd.synchronize(handle) is None

    gathered = torch.cat(everybody)
    same(hvd.allgather(own), gathered, "allgather")
    same(hvd.synchronize(hvd.allgather_async(own)), gathered, "allgather_async")
    same(hvd.grouped_allgather([torch.ones(1), own])[1], gathered, "grouped_allgather")
    root = size - 1
    same(hvd.broadcast(own, root), everybody[root], "broadcast")
    same(hvd.synchronize(hvd.broadcast_async(own, root)), everybody[root], "broadcast_async")
    for cast in (hvd.broadcast_, lambda x, root: hvd.synchronize(hvd.broadcast_async_(x, root))):
        x = copy()
        assert cast(x, root) is x
        same(x, everybody[root], "broadcast in place")
    x = copy()
    hvd.broadcast_parameters({"x": x}, root)
    same(x, everybody[root], "broadcast_parameters")
    same(hvd.broadcast_object(own, root), everybody[root], "broadcast_object")

    rows = own.shape[0]
    splits = [0] * (size - 1) + [rows]  # all of them to the last rank
    expected = gathered if rank == size - 1 else gathered[:0]
    same(hvd.alltoall(own, splits)[0], expected, "alltoall")
    same(hvd.synchronize(hvd.alltoall_async(own, splits))[0], expected, "alltoall_async")
    mine = torch.tensor_split(total, size)[rank]
    same(hvd.reducescatter(own, op=hvd.Sum), mine, "reducescatter")
    same(hvd.synchronize(hvd.reducescatter_async(own, op=hvd.Sum)), mine, "reducescatter_async")
    same(hvd.grouped_reducescatter([own, own], op=hvd.Sum)[1], mine, "grouped_reducescatter")
    same(own, _values(kind, rank), "the input must not change")


@pytest.mark.parametrize("kind", KINDS)
def test_operations_take_the_values_that_are_shown(pair: World, kind: str) -> None:
    pair.run(_operations, kind)


def _gradients(kind: str) -> None:
    """As in one process that has the tensors of all ranks."""
    rank, size = hvd.rank(), hvd.size()
    weights = _values(kind, 3)

    def loss(result: torch.Tensor) -> torch.Tensor:
        w = weights.resolve_conj().expand_as(result) if result.shape == weights.shape else weights[:1].resolve_conj()
        return (result * w).abs().square().sum() + (result * w).real.sum()

    def leaf(r: int) -> torch.Tensor:
        return _values(kind, r).detach().requires_grad_()

    for operation, alone in (
        (lambda x: hvd.allreduce(x, op=hvd.Sum), sum),
        (lambda x: hvd.grouped_allreduce([x], op=hvd.Sum)[0], sum),
        (hvd.allgather, torch.cat),
        (lambda x: hvd.broadcast(x, 0), lambda xs: xs[0] * 1),
    ):
        xs = [leaf(r) for r in range(size)]
        loss(alone(xs)).backward()
        own = leaf(rank)
        loss(operation(own)).backward()
        assert own.grad is not None
        wanted = xs[rank].grad if xs[rank].grad is not None else torch.zeros_like(own)
        # Sum's backward pass adds the ranks' equal gradients; those of the others average them.
        times = size if operation not in (hvd.allgather,) and alone([torch.ones(1)] * size) == size else 1
        torch.testing.assert_close(own.grad, wanted * times)


@pytest.mark.parametrize("kind", ["transposed", "negative", "imaginary part of a conjugate", "complex", "conjugate"])
def test_gradients_follow_the_values(pair: World, kind: str) -> None:
    pair.run(_gradients, kind)


def _sparse() -> None:
    entries = torch.complex(torch.arange(3.0), torch.ones(3) * hvd.rank())
    mine = torch.sparse_coo_tensor(torch.tensor([[0, 2, 3]]), entries, (5,), check_invariants=True)
    total = sum(torch.complex(torch.arange(3.0), torch.ones(3) * r) for r in range(hvd.size()))
    found = hvd.sparse_allreduce_async(mine, "waves", hvd.Sum)().to_dense()
    assert torch.equal(found[[0, 2, 3]], total)
    places, ones = torch.tensor([[0, 1, 2]]), torch._neg_view(-torch.ones(3))
    negative = torch.sparse_coo_tensor(places, ones, (3,), check_invariants=True)
    assert hvd.sparse_allreduce_async(negative, "negative", hvd.Average)().to_dense().tolist() == [1.0] * 3


def test_sparse_tensors(pair: World) -> None:
    pair.run(_sparse)


class _Spectrum(torch.nn.Module):
    """Real and complex parameters, one of them used through its conjugate; gradients of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.filter = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.complex128, generator=generator))
        self.other = torch.nn.Parameter(torch.randn(4, dtype=torch.complex128, generator=generator))
        self.real = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = torch.fft.fft(x.to(torch.complex128)) @ self.filter.conj().t() + self.other.conj()
        return (waves.conj().imag + waves.real) @ self.real


def _train(ranks: list[int], options: dict[str, Any]) -> list[torch.Tensor]:
    model = _Spectrum()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if hvd.size() > 1 and len(ranks) == 1:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
    batches = [torch.randn(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in ranks]
    for step in range(3):
        optimizer.zero_grad()
        sum(model(batch[step]).square().mean() / len(ranks) for batch in batches).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _equals_one_process(options: dict[str, Any], tolerance: float) -> None:
    together = _train([hvd.rank()], options)
    alone = _train(list(range(hvd.size())), options)
    for mine, wanted in zip(together, alone, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options",
    [{}, {"groups": 2}, {"gradient_predivide_factor": 2.0}, {"compression": hvd.Compression.fp16}],
    ids=["plain", "groups", "predivide", "fp16"],
)
def test_complex_parameters_train_as_in_one_process(pair: World, options: dict[str, Any]) -> None:
    pair.run(_equals_one_process, options, 1e-2 if "compression" in options else 1e-12)


def _negative_gradient() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
    weight.grad = torch._neg_view(torch.full((4,), -1.0 - hvd.rank()))
    optimizer.synchronize()
    assert weight.grad.tolist() == [1.5] * 4


def test_a_gradient_with_the_negative_bit(pair: World) -> None:
    pair.run(_negative_gradient)


def _refusals() -> None:
    spread = torch.ones(1).expand(4)
    for call in (
        lambda: hvd.allreduce_(spread),
        lambda: hvd.broadcast_(spread, 0),
        lambda: hvd.allreduce_async_(torch.ones(6).as_strided((3, 3), (1, 1))),
        lambda: hvd.grouped_allreduce_([torch.ones(2), spread]),
        lambda: hvd.broadcast_parameters({"spread": spread}, 0),
    ):
        with pytest.raises(ValueError, match=ends_with(OperationCode.OVERLAPPING, "expand", ".contiguous()")):
            call()
    for call in (
        lambda: hvd.allreduce_(spread, name="spread"),
        lambda: hvd.grouped_allreduce_([torch.ones(2), spread], name="spread"),
    ):
        with pytest.raises(ValueError, match=ends_with(OperationCode.OVERLAPPING, "allreduce.spread'")):
            call()
    assert hvd.allreduce(spread).tolist() == [1.0] * 4
    waves = torch.ones(2, dtype=torch.complex64)
    for op in (hvd.Min, hvd.Max, hvd.Product):
        with pytest.raises(ValueError, match=ends_with(OperationCode.UNDEFINED_REDUCTION, "complex")):
            hvd.allreduce(waves, op=op)
        with pytest.raises(ValueError, match=ends_with(OperationCode.UNDEFINED_REDUCTION, "complex")):
            hvd.grouped_allreduce([waves], op=op)
    with pytest.raises(ValueError, match=ends_with(OperationCode.UNDEFINED_REDUCTION, "floating-point")):
        hvd.allreduce(waves, op=hvd.Adasum)
    for call in (hvd.allgather, hvd.alltoall, lambda x: hvd.grouped_allgather([x])):
        with pytest.raises(hvd.HorovodInternalError, match=ends_with(OperationCode.NO_ROWS)):
            call(waves[0])
    assert hvd.allreduce(waves[0]) == 1


def test_what_has_no_meaning_is_refused(pair: World) -> None:
    pair.run(_refusals)


def _inference_and_leaves() -> None:
    with torch.inference_mode():
        x = torch.ones(3, 4).t() * (hvd.rank() + 1)
    hvd.allreduce_(x, op=hvd.Sum)
    assert x.unique().tolist() == [3.0]
    leaf = torch.ones(3, 4).t().requires_grad_()
    hvd.allreduce_(leaf, op=hvd.Sum)
    assert leaf.unique().tolist() == [2.0]
    result = hvd.allreduce(torch.ones(2, dtype=torch.complex64, requires_grad=True), op=hvd.Sum)
    result += 1  # it is no view
    assert result.tolist() == [3, 3]


def test_tensors_of_inference_and_leaves(pair: World) -> None:
    pair.run(_inference_and_leaves)


def _batch_norm() -> None:
    norm = hvd.SyncBatchNorm(3)
    plain = torch.nn.BatchNorm1d(3)
    batches = [torch.randn(5, 3, generator=torch.Generator().manual_seed(r)) for r in range(hvd.size())]
    own = torch.complex(batches[hvd.rank()] * 0, -batches[hvd.rank()]).conj().imag
    torch.testing.assert_close(norm(own), plain(torch.cat(batches))[5 * hvd.rank() : 5 * (hvd.rank() + 1)])
    with pytest.raises(ValueError, match=ends_with(OperationCode.UNSUPPORTED_DTYPE, "complex64")):
        norm(torch.ones(5, 3, dtype=torch.complex64))


def test_batch_norm(pair: World) -> None:
    pair.run(_batch_norm)
