"""Copies of a distributed optimizer, by copy.deepcopy, pickle or torch.save, are distributed, of the copied model."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
from error_codes import ends_with
from optimizer_model import distributed_sgd, expected_gradient, linear, rows
from worlds import Keeper, World

from horovod.base.errors import OperationCode, TrainingCode


def _saved(value: Any) -> Any:
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "cloudpickle": lambda value: cloudpickle.loads(cloudpickle.dumps(value)),
    "torch.save": _saved,
}


def _train(model: Any, optimizer: Any) -> Any:
    optimizer.zero_grad()
    model(rows()).sum().backward()
    optimizer.step()
    return model.weight.grad


def _copied(way: str) -> None:
    import torch

    import horovod.torch as hvd

    model = linear()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=hvd.Sum, groups=1)
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.set_backward_passes_per_step(2)
    optimizer.set_backward_passes_per_step(1)
    extra = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.zeros_like(extra)
    _train(model, optimizer)

    everything = (model, extra, optimizer, before, after)
    other, other_extra, other_optimizer, other_before, other_after = WAYS[way](everything)
    assert isinstance(other_optimizer, torch.optim.SGD)
    assert "horovod" in str(type(other_optimizer))
    assert (other_optimizer.op, other_optimizer.backward_passes_per_step) == (hvd.Sum, 1)
    assert other_optimizer.process_set is hvd.global_process_set
    assert other_after.optimizer is other_optimizer
    names = {other.weight: "weight", other.bias: "bias", other_extra: "allreduce.noname.1.0"}
    assert other_optimizer._parameter_names == names
    assert not {*other.parameters()} & {*model.parameters()}

    for _ in range(2):  # in turn: the copy is as good as the original, and neither touches the other
        gradients = [_train(model, optimizer), _train(other, other_optimizer)]
        for gradient in gradients:
            torch.testing.assert_close(gradient, 2 * expected_gradient())
        for scheduler in (before, after, other_before, other_after):
            scheduler.step()
        assert torch.equal(other.weight, model.weight)
        assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 16)
    other_optimizer.load_state_dict(optimizer.state_dict())
    assert other_before.optimizer.param_groups is other_optimizer.param_groups


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_reduces_like_the_original(pair: World, way: str) -> None:
    pair.run(_copied, way)


def _groups_and_compression() -> None:
    import torch

    import horovod.torch as hvd
    from horovod.torch.compression import GradientCompressor

    class Remembers(GradientCompressor):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def reduce(self, name: str, gradient: Any) -> Any:
            self.seen.append(name)
            yield gradient
            return gradient

    compressor = Remembers()
    model = linear()
    optimizer = distributed_sgd(model, compression=compressor)
    _train(model, optimizer)
    other, other_optimizer = copy.deepcopy((model, optimizer))
    torch.testing.assert_close(_train(other, other_optimizer), expected_gradient())
    assert sorted(compressor.seen) == ["bias", "weight"]  # what a compressor knows is of one optimizer

    wire = []
    named = list(model.named_parameters())
    optimizer = distributed_sgd(model, groups=[[named[0][1], named[1][1]]], compression=hvd.Compression.fp16)
    other, other_optimizer = copy.deepcopy((model, optimizer))
    sender = other_optimizer._hvd_reducer._sender
    start, sender.start_group = sender.start_group, lambda group, quiet: (wire.append(group), start(group, quiet))
    torch.testing.assert_close(_train(other, other_optimizer), expected_gradient())
    assert [slot.name for slot in wire[0].slots] == ["weight", "bias"]
    assert {slot.parameter for slot in wire[0].slots} == {*other.parameters()}


def test_groups_and_compressors_are_copied(pair: World) -> None:
    pair.run(_groups_and_compression)


def _many_copies() -> None:
    """As in meta-learning: a copy for each task, which is thrown away; the original goes on."""
    import torch

    model = linear()
    optimizer = distributed_sgd(model)
    for _ in range(3):
        learner, inner = copy.deepcopy((model, optimizer))
        for _ in range(2):
            torch.testing.assert_close(_train(learner, inner), expected_gradient())
        torch.testing.assert_close(_train(model, optimizer), expected_gradient())
    weight = learner.weight
    hooks = weight._post_accumulate_grad_hooks
    assert len(hooks) == 1
    del inner
    gc.collect()
    assert not hooks


def test_a_copy_for_each_task(pair: World) -> None:
    pair.run(_many_copies)


def _in_the_middle_of_a_step() -> None:
    import torch

    model = linear()
    optimizer = distributed_sgd(model, backward_passes_per_step=2)
    model(rows()).sum().backward()
    other, other_optimizer = copy.deepcopy((model, optimizer))
    model(rows()).sum().backward()
    optimizer.step()
    other_optimizer.zero_grad()
    for _ in range(2):
        other(rows()).sum().backward()
    other_optimizer.step()
    torch.testing.assert_close(model.weight.grad, 2 * expected_gradient())
    torch.testing.assert_close(other.weight.grad, 2 * expected_gradient())


def test_a_copy_begins_a_new_step(pair: World) -> None:
    pair.run(_in_the_middle_of_a_step)


def _other_values() -> None:
    """What a script has put into the distributed optimizer is what is copied, not what it was made from."""
    from collections import defaultdict

    import torch

    class Counting(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            return super().step(closure)

        def __getstate__(self) -> Any:
            return self.__dict__.copy()

    import horovod.torch as hvd

    model = linear()
    optimizer = hvd.DistributedOptimizer(
        Counting(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
    )
    for _ in range(2):
        _train(model, optimizer)
    optimizer.state = defaultdict(dict)
    other, other_optimizer = copy.deepcopy((model, optimizer))
    assert other_optimizer.steps == 2
    assert not other_optimizer.state
    torch.testing.assert_close(_train(other, other_optimizer), expected_gradient())
    assert other_optimizer.steps == 3


def test_values_of_the_script_are_copied(pair: World) -> None:
    pair.run(_other_values)


def _shallow() -> None:
    import torch

    model = linear()
    optimizer = distributed_sgd(model)
    _ = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    twin = copy.copy(optimizer)
    torch.testing.assert_close(_train(model, twin), expected_gradient())
    assert twin.state is optimizer.state
    torch.testing.assert_close(_train(model, optimizer), expected_gradient())


def test_a_shallow_copy_reduces_once(pair: World) -> None:
    pair.run(_shallow)


def _scaled() -> None:
    import torch

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = linear()
    model, optimizer, scaler = copy.deepcopy((model, distributed_sgd(model), scaler))
    scaler.scale(model(rows()).sum()).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(model.weight.grad, expected_gradient())
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()


def test_a_copy_with_a_grad_scaler(pair: World) -> None:
    pair.run(_scaled)


def _broadcast() -> None:
    """Rank 0's with its model, on all ranks: root keeps its own, the names are the same on all."""
    import torch

    import horovod.torch as hvd

    model = linear(hvd.rank())
    optimizer = distributed_sgd(model)
    model, optimizer = hvd.broadcast_object((model, optimizer), root_rank=0)
    torch.testing.assert_close(_train(model, optimizer), expected_gradient())
    weights = hvd.allgather(model.weight.detach())
    assert torch.equal(weights[:2], weights[2:])


def test_an_optimizer_is_sent_to_other_ranks(pair: World) -> None:
    pair.run(_broadcast)


def _in_a_set() -> None:
    import torch

    import horovod.torch as hvd

    hvd.shutdown()
    alone = hvd.ProcessSet([1])
    hvd.init(process_sets=[alone])
    model = linear()
    optimizer = distributed_sgd(model, process_set=alone)
    for way in WAYS.values():
        other, other_optimizer = way((model, optimizer))
        assert other_optimizer.process_set is alone
        torch.testing.assert_close(_train(other, other_optimizer), rows().sum(0).expand(2, 3))
    pickled = pickle.dumps((model, optimizer))
    hvd.shutdown()
    before = pickle.loads(pickled)
    assert before[1].process_set.ranks == [1]
    alone = hvd.ProcessSet([1])
    hvd.init(process_sets=[alone])
    torch.testing.assert_close(_train(*before), rows().sum(0).expand(2, 3))
    assert before[1].process_set is alone
    hvd.shutdown()
    hvd.init()
    other, other_optimizer = pickle.loads(pickled)
    other(rows()).sum().backward()
    with pytest.raises(ValueError, match=ends_with(OperationCode.NO_SUCH_SET, "ranks=[1]")):
        other_optimizer.step()


def test_a_copy_has_the_process_set(pair: World) -> None:
    pair.run(_in_a_set)


def _before_init(op: str) -> None:
    """One that is unpickled before hvd.init() can be looked at; it reduces after that, and never steps without."""
    import torch

    import horovod.torch as hvd

    model = linear()
    pickled = pickle.dumps((model, distributed_sgd(model, op=getattr(hvd, op))))
    expected = _train(*pickle.loads(pickled))
    inputs = rows()
    hvd.shutdown()
    model, optimizer = pickle.loads(pickled)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
    assert optimizer.op == getattr(hvd, op)
    model(inputs).sum().backward()
    with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_INITIALIZED)):
        optimizer.step()
    hvd.init()
    for _ in range(2):
        torch.testing.assert_close(_train(model, optimizer), expected)
    weights = hvd.allgather(model.weight.detach())
    assert torch.equal(weights[:2], weights[2:])


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_unpickled_before_init(pair: World, op: str) -> None:
    pair.run(_before_init, op)


def _pickled_adasum() -> bytes:
    import horovod.torch as hvd

    model = linear()
    return pickle.dumps((model, distributed_sgd(model, op=hvd.Adasum)))


def test_adasum_of_many_goes_on_alone(pair: World) -> None:
    pickled = pair.run(_pickled_adasum)[0]
    import horovod.torch as hvd

    hvd.init()
    try:
        model, optimizer = pickle.loads(pickled)
        with optimizer.skip_synchronize():  # there is nobody to combine steps with: the plain optimizer
            optimizer.step()
        assert model.weight.grad is None
    finally:
        hvd.shutdown()


def _adasum() -> None:
    import torch

    import horovod.torch as hvd

    model = linear()
    optimizer = distributed_sgd(model, op=hvd.Adasum)
    for way in WAYS.values():
        other, other_optimizer = way((model, optimizer))
        for _ in range(2):
            _train(other, other_optimizer)
        weights = hvd.allgather(other.weight.detach())
        assert torch.equal(weights[:2], weights[2:])
        assert not torch.equal(other.weight, model.weight)
    _train(model, optimizer)
    _train(model, optimizer)
    assert torch.equal(other.weight, model.weight)


@pytest.fixture(scope="module")
def overlapping() -> Iterator[World]:
    with Keeper(2, "shm", {"HOROVOD_ADASUM_OVERLAP": "1"}) as keeper:
        yield keeper.get()


def test_adasum(pair: World) -> None:
    pair.run(_adasum)


def test_adasum_beside_the_backward_pass(overlapping: World) -> None:
    overlapping.run(_adasum)


def _class_called() -> None:
    model = linear()
    optimizer = distributed_sgd(model)
    with pytest.raises(TypeError, match=ends_with(TrainingCode.NOT_DISTRIBUTED, "torch.optim.sgd.SGD")):
        type(optimizer)(model.parameters(), lr=0.1)


def test_the_class_is_not_called(pair: World) -> None:
    pair.run(_class_called)
