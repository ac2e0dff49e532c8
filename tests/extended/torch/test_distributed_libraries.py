"""Unmodified programs that use torch.distributed have equal results over our backend and over gloo, on 2 or 4 ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import Keeper

import horovod.torch as hvd

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def keeper() -> Iterator[Keeper]:
    with Keeper(2, "shm") as keeper:
        yield keeper


@pytest.fixture(scope="module")
def keeper_of_four() -> Iterator[Keeper]:
    with Keeper(4, "shm") as keeper:
        yield keeper


@pytest.fixture
def both(keeper: Keeper, tmp_path: Path) -> Callable[..., None]:
    """Runs a program with either backend as that of the default group, and compares what it returns."""

    def run(program: Callable[..., Any], **tolerance: float) -> None:
        by_backend = [
            keeper.get().run(_run, program, backend, str(tmp_path / backend)) for backend in ("horovod", "gloo")
        ]
        torch.testing.assert_close(*by_backend, **({"rtol": 0, "atol": 0} | tolerance))

    return run


def _run(program: Callable[..., Any], backend: str, folder: str) -> Any:
    import horovod.torch.distributed  # noqa: F401  (registers the backend)

    if hvd.rank() == 0:
        Path(folder).mkdir()
    hvd.barrier()
    store = dist.FileStore(f"{folder}/store", hvd.size())
    dist.init_process_group(backend, store=store, rank=hvd.rank(), world_size=hvd.size())
    try:
        torch.manual_seed(3)
        return program(folder)
    finally:
        dist.destroy_process_group()


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(3)))


def _steps(model: torch.nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        loss = model(torch.randn(8, 16)).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def _fully_shard(folder: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = _model()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    losses = _steps(model)
    return losses, [parameter.full_tensor() for parameter in model.parameters()]


def test_fully_sharded(both: Callable[..., None]) -> None:
    both(_fully_shard)


def _checkpoint(folder: str) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def made() -> Any:
        model = fully_shard(_model())
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = made()
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/saved")
    other, others_optimizer = made()
    weights, state = get_state_dict(other, others_optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/saved")
    set_state_dict(other, others_optimizer, model_state_dict=weights, optim_state_dict=state)
    for one, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), loaded.full_tensor())
    return [parameter.full_tensor() for parameter in other.parameters()]


def test_checkpoints(both: Callable[..., None]) -> None:
    both(_checkpoint)


def _tensor_parallel(folder: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    output = model(torch.ones(4, 16))
    output.sum().backward()
    table = distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(0)])
    return [
        output.detach(),
        *(parameter.grad.full_tensor() for parameter in model.parameters()),
        table.redistribute(mesh, [Shard(1)]).to_local(),
        table.redistribute(mesh, [Replicate()]).to_local(),
    ]


def test_tensor_parallel(both: Callable[..., None]) -> None:
    both(_tensor_parallel, rtol=1e-6, atol=1e-6)


def _zero(folder: str) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 16) * (dist.get_rank() + 1)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_zero_redundancy_optimizer(both: Callable[..., None]) -> None:
    both(_zero)


def _fsdp1(folder: str) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped = FullyShardedDataParallel(
        _model(),
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Sequential}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    losses = _steps(wrapped)
    wrapped.clip_grad_norm_(1.0)
    return losses, wrapped.state_dict()


def test_fully_sharded_data_parallel_of_the_first_kind(both: Callable[..., None]) -> None:
    both(_fsdp1)


class _Branches(torch.nn.Module):
    """Uses one of two models, in each step another on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList([_model(), _model()])
        self.calls = 0

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.branches[(self.calls + dist.get_rank()) % 2](given)


def _graphs(folder: str) -> Any:
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    unused = DistributedDataParallel(_Branches(), find_unused_parameters=True)
    found = [_steps(unused, 4), list(unused.parameters())]

    class Recomputed(torch.nn.Module):
        """Calls the same layers twice and computes them anew in the backward pass: a graph that DDP must be told of."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = _model()

        def forward(self, given: torch.Tensor) -> Any:
            return self.layers(checkpoint(self.layers, given, use_reentrant=False))

    static = DistributedDataParallel(Recomputed(), static_graph=True, gradient_as_bucket_view=True)
    found += [_steps(static, 4), list(static.parameters())]
    accumulated = DistributedDataParallel(_model())
    with accumulated.no_sync():
        accumulated(torch.ones(2, 16) * dist.get_rank()).sum().backward()
    accumulated(torch.ones(2, 16)).sum().backward()
    return [*found, [parameter.grad for parameter in accumulated.parameters()]]


def test_unused_parameters_static_graphs_and_accumulation(both: Callable[..., None]) -> None:
    both(_graphs)


def _ddp_with_all_it_has(folder: str) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    found: list[Any] = []
    halves = DistributedDataParallel(_model())
    halves.register_comm_hook(None, default_hooks.fp16_compress_hook)
    found.append(_steps(halves))
    low_rank = DistributedDataParallel(_model())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    low_rank.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    found.append(_steps(low_rank, 4))
    uneven = DistributedDataParallel(_model())
    with Join([uneven]):
        found.append(_steps(uneven, 2 + 2 * dist.get_rank()))
    return found


def test_hooks_and_uneven_inputs(both: Callable[..., None]) -> None:
    both(_ddp_with_all_it_has)


def _functional(folder: str) -> Any:
    import torch.distributed._functional_collectives as functional
    from torch.distributed.nn import functional as with_gradients

    rank = dist.get_rank()
    group = dist.group.WORLD
    found = [
        functional.all_reduce(torch.ones(2) * rank, "sum", group).clone(),
        functional.all_gather_tensor(torch.ones(2) * rank, 0, group).clone(),
        functional.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, group).clone(),
        functional.all_to_all_single(torch.arange(4.0) + 10 * rank, None, None, group).clone(),
        functional.broadcast(torch.ones(2) * rank, 1, group).clone(),
    ]
    leaf = torch.full((2,), float(rank + 1), requires_grad=True)
    (with_gradients.all_reduce(leaf * leaf) * (rank + 1)).sum().backward()
    compiled = torch.compile(
        lambda tensor: functional.all_reduce(tensor * 2, "sum", group) + 1, backend="aot_eager", fullgraph=True
    )
    return [*found, leaf.grad, compiled(torch.ones(3) * rank)]


def test_functional_collectives_also_compiled(both: Callable[..., None]) -> None:
    both(_functional)


def _hybrid(folder: str) -> Any:
    """Replicas of two shards each: two FSDP2 steps on a mesh of two dimensions, then a checkpoint of one replica."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(_model(), mesh=mesh)
    losses = _steps(model, 2)
    saving = dcp.async_save({"model": model.state_dict()}, checkpoint_id=f"{folder}/saved")
    first_kind = FullyShardedDataParallel(
        _model(),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )
    losses += _steps(first_kind, 2)
    saving.result()
    return losses, [parameter.full_tensor() for parameter in model.parameters()]


def _loads(saved: str, folder: str) -> list[torch.Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(4)
    model = fully_shard(_model())
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=saved)
    model.load_state_dict(state["model"])
    return [parameter.full_tensor() for parameter in model.parameters()]


def test_four_ranks_in_two_dimensions_save_while_they_train_and_two_load(
    keeper_of_four: Keeper, keeper: Keeper, tmp_path: Path
) -> None:
    ours, theirs = (
        keeper_of_four.get().run(_run, _hybrid, backend, str(tmp_path / backend)) for backend in ("horovod", "gloo")
    )
    torch.testing.assert_close(ours, theirs)
    load = functools.partial(_loads, str(tmp_path / "horovod" / "saved"))
    for loaded in keeper.get().run(_run, load, "horovod", str(tmp_path / "loaded")):
        torch.testing.assert_close(loaded, ours[0][1], rtol=0, atol=0)
