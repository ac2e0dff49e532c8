"""Compressors of a user's own in DistributedOptimizer: what they may do, and what they are told."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from error_codes import ends_with
from worlds import World

import horovod.torch as hvd
from horovod.base.errors import OperationCode, TrainingCode
from horovod.torch.compression import Compression, Compressor, GradientCompressor


class Rounds(GradientCompressor):
    """Loses nothing: sends a gradient in as many parts as its parameter's name is long, modulo 4, possibly none."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()

    def reduce(self, name: str, gradient: torch.Tensor) -> Any:
        assert gradient.is_contiguous()
        assert not torch.is_grad_enabled()
        self.calls[name] += 1
        parts = len(name) % 4
        if parts == 0:
            return gradient.fill_(7)
        if parts == 1:
            yield gradient
            return gradient
        reduced = [part.clone() for part in gradient.view(-1).tensor_split(parts)]
        yield from reduced
        return torch.cat(reduced).view_as(gradient)


def _model() -> Any:
    torch.manual_seed(1)
    return torch.nn.ParameterDict({"a" * n: torch.nn.Parameter(torch.randn(n, 5).double()) for n in (1, 2, 3, 5, 6, 7)})


def _gradients(compression: Any, passes: int = 1, steps: int = 2, **options: Any) -> list[list[float]]:
    """Of the last step, which differ between ranks but for the reduction."""
    model = _model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=compression,
        backward_passes_per_step=passes,
        **options,
    )
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            sum((weight.pow(2) * (hvd.rank() + 2 * step + number + 1)).sum() for weight in model.values()).backward()
        optimizer.step()
    return [weight.grad.flatten().tolist() for weight in model.values()]


# -- what a compressor may do ------------------------------------------------------------------------------------------
def test_several_reductions_of_a_gradient_are_as_good_as_one(world: World) -> None:
    _assert_equal(world)


@pytest.mark.parametrize("options", [{"passes": 3}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}], ids=str)
def test_options_mean_what_they_mean_without_a_compressor(pair: World, options: dict[str, Any]) -> None:
    _assert_equal(pair, **options)


def _assert_equal(world: World, **options: Any) -> None:
    expected = world.run(_gradients, Compression.none, **options)
    assert all(gradients == expected[0] for gradients in expected)
    assert world.run(_gradients, Rounds(), **options) == expected


def _no_reduction_at_all() -> None:
    model = torch.nn.ParameterDict({"none": torch.nn.Parameter(torch.zeros(3))})
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), compression=Rounds()
    )
    model["none"].sum().backward()
    optimizer.step()
    assert model["none"].tolist() == [-7.0] * 3


def test_a_compressor_may_reduce_nothing(pair: World) -> None:
    pair.run(_no_reduction_at_all)


def _other_layouts() -> None:
    compressor = Rounds()
    model = torch.nn.ModuleDict(
        {
            "ab": torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),
            "e": torch.nn.Embedding(4, 2, sparse=True),
        }
    ).double()
    named = [("conv.w", model["ab"].weight), ("conv.bb", model["ab"].bias), ("embed", model["e"].weight)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named, compression=compressor, sparse_as_dense=True
    )
    image = torch.ones(1, 2, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    loss = model["ab"](image).sum() * (1 + hvd.rank()) + model["e"](torch.tensor([hvd.rank()])).sum()
    loss.backward()
    optimizer.synchronize()
    torch.testing.assert_close(model["ab"].weight.grad, torch.full((3, 2, 3, 3), 1.5, dtype=torch.float64))
    assert model["ab"].weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert model["e"].weight.grad.is_sparse
    expected = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0, 0], [0, 0]], dtype=torch.float64)
    torch.testing.assert_close(model["e"].weight.grad.to_dense(), expected)
    assert compressor.calls == {"conv.w": 1, "conv.bb": 1, "embed": 1}


def test_gradients_of_other_layouts_arrive_dense_and_contiguous(pair: World) -> None:
    pair.run(_other_layouts)


def _unused_and_clipped() -> None:
    compressor = Rounds()
    used, unused = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([used, unused], lr=1.0), [("used.", used), ("unused", unused)], compression=compressor
    )
    (used.sum() * hvd.rank()).backward()
    optimizer.synchronize()
    assert used.grad.tolist() == [0.5] * 3
    assert unused.grad.tolist() == [0.0] * 3
    torch.nn.utils.clip_grad_value_([used, unused], 0.25)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert used.tolist() == [0.75] * 3


def test_unused_parameters_and_clipping(pair: World) -> None:
    pair.run(_unused_and_clipped)


def _in_a_process_set() -> None:
    pair, weight = hvd.add_process_set([0, 2]), torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)], compression=Rounds(), process_set=pair
    )
    (weight.sum() * hvd.rank()).backward()
    optimizer.step()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]  # of ranks 0 and 2; rank 1 is on its own


def test_process_sets() -> None:
    with World(3, environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}) as trio:
        trio.run(_in_a_process_set)


class Rounded(Compressor):
    """A compressor of two functions: whole numbers."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.round().to(torch.int32), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


def _two_functions() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)], compression=Rounded, op=hvd.Sum
    )
    (weight.sum() * (1.4 + hvd.rank())).backward()  # 1.4 and 2.4
    optimizer.step()
    assert weight.grad.dtype == torch.float32
    assert weight.grad.tolist() == [3.0] * 3
    assert hvd.allreduce(torch.tensor([0.6]), op=hvd.Sum, compression=Rounded).item() == 2.0


def test_a_compressor_of_two_functions(pair: World) -> None:
    pair.run(_two_functions)


# -- what it is told ---------------------------------------------------------------------------------------------------
class Bad(GradientCompressor):
    def __init__(self, does: str) -> None:
        self.does = does

    def reduce(self, name: str, gradient: torch.Tensor) -> Any:
        if self.does != "nothing":
            yield 3 if self.does == "number" else gradient.t() if self.does == "transposed" else gradient
        return gradient.view(-1) if self.does == "flat" else None


class NoGenerator(GradientCompressor):
    def reduce(self, name: str, gradient: torch.Tensor) -> Any:
        return gradient


MISTAKES = [
    (Bad("number"), ends_with(TrainingCode.INVALID_COMPRESSOR, "Bad.reduce", "'w'", "int")),
    (Bad("forgets"), ends_with(TrainingCode.INVALID_COMPRESSOR, "Bad.reduce", "'w'", "NoneType", "[2, 3]")),
    (Bad("flat"), ends_with(TrainingCode.INVALID_COMPRESSOR, "Bad.reduce", "'w'", "[6]", "[2, 3]")),
    (Bad("nothing"), ends_with(TrainingCode.INVALID_COMPRESSOR, "Bad.reduce", "'w'", "NoneType", "[2, 3]")),
    (NoGenerator(), ends_with(TrainingCode.INVALID_COMPRESSOR, "NoGenerator.reduce", "'w'", "generator")),
]


def _mistaken(compressor: GradientCompressor, message: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], compression=compressor)
    loss = weight.sum()
    with pytest.raises(ValueError, match=message):  # noqa: PT012 (which of the two raises depends on the mistake)
        loss.backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())  # forgets the half-made step
    hvd.barrier()


@pytest.mark.parametrize(("compressor", "message"), MISTAKES)
def test_a_mistake_is_named(pair: World, compressor: GradientCompressor, message: str) -> None:
    pair.run(_mistaken, compressor, message)


def _construction() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([weight], lr=1.0)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_COMPRESSOR, "Rounds(...)")):
        hvd.DistributedOptimizer(sgd, compression=Rounds)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "Rounds", "groups")):
        hvd.DistributedOptimizer(sgd, compression=Rounds(), groups=1)
    for op in (hvd.Adasum, hvd.Max):
        with pytest.raises(ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "Rounds", "op=")):
            hvd.DistributedOptimizer(sgd, compression=Rounds(), op=op)
    with pytest.raises(NotImplementedError, match="GradientCompressor must define reduce"):
        GradientCompressor().reduce("w", weight)


def test_construction(pair: World) -> None:
    pair.run(_construction)


def _one_compresses() -> None:
    weight = torch.nn.Parameter(torch.ones(40, 50))
    compression = Rounds() if hvd.rank() else Compression.none
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("layers.weights", weight)], compression=compression
    )
    with pytest.raises(
        hvd.HorovodInternalError,
        match=ends_with(OperationCode.MISMATCHED, "allreduce.layers.weights", "rank 0"),
    ):
        weight.sum().backward()
    optimizer.zero_grad()


def test_all_ranks_must_compress_alike(pair: World) -> None:
    pair.run(_one_compresses)
