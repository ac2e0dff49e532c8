"""Two ranks with HorovodStrategy are one process that has the batches of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning_models
import pytest
import torch
from error_codes import ends_with
from lightning_models import loader, model, trainer, weights
from worlds import World

from horovod.base.errors import TrainingCode

CASES: dict[str, dict[str, Any]] = {
    "plain": {"gradient_clip_val": 0.5},
    "accumulated": {"kind": "plain", "gradient_clip_val": 0.5, "accumulate_grad_batches": 3},  # of 5 batches
    "unused": {"gradient_clip_val": 0.5},
    "normalized": {"sync_batchnorm": True},
    "searching": {},
    "frozen": {},
    "manual": {},
    "mixed": {"kind": "plain", "precision": "bf16-mixed"},
}
# By how much the weights may differ. LBFGS amplifies differences, and bfloat16 has eight bits.
TOLERANCE = {"searching": 2e-4, "mixed": 2e-2}


def _parted(case: str, package: str) -> float:
    """By how much the weights of a rank differ from those of one process."""
    import horovod.torch as hvd

    options = dict(CASES[case])
    kind = options.pop("kind", case)
    together, alone = model(kind, package), model(kind, package)
    with torch.no_grad():  # rank 0's weights are to count
        next(together.parameters()).add_(hvd.rank())
    trainer(package, joined=True, **options).fit(together, loader(joined=True))
    trainer(package, joined=False, **(options | {"sync_batchnorm": False})).fit(alone, loader(joined=False))
    assert not any(one._post_accumulate_grad_hooks for one in together.parameters()), "the model is free again"
    ranks = hvd.allgather(weights(together).unsqueeze(0))
    assert torch.equal(ranks[0], ranks[1])
    return float((weights(together) - weights(alone)).abs().max())


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_one_process(lightning_pair: World, case: str) -> None:
    assert max(lightning_pair.run(_parted, case, "lightning")) < TOLERANCE.get(case, 2e-6)


def test_the_other_name_of_lightning(lightning_pair: World) -> None:
    assert max(lightning_pair.run(_parted, "accumulated", "pytorch_lightning")) < 2e-6


def _checkpoints(folder: Path) -> tuple[list[str], float]:
    """What this rank has written, and by how much training that was resumed differs from training that was not."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    import horovod.torch as hvd

    own = folder / f"rank-{hvd.rank()}"
    whole, first, second = (model("plain", "lightning") for _ in range(3))
    trainer("lightning", joined=True).fit(whole, loader(joined=True))
    # Rank 0 says where: the other one's folder stays empty.
    saving = {"callbacks": [ModelCheckpoint(dirpath=own, filename="{epoch}")], "enable_checkpointing": True}
    running = trainer("lightning", joined=True, max_epochs=1, **saving)
    running.fit(first, loader(joined=True))
    running.save_checkpoint(own / "last.ckpt")
    path = folder / "rank-0" / "epoch=0.ckpt"
    trainer("lightning", joined=True).fit(second, loader(joined=True), ckpt_path=path)
    if hvd.rank() == 0:  # a process alone goes on with it, too
        alone = model("plain", "lightning")
        trainer("lightning", joined=False).fit(alone, loader(joined=False), ckpt_path=path)
        assert (weights(alone) - weights(whole)).abs().max() < 2e-6
    return sorted(path.name for path in own.glob("*")), float((weights(whole) - weights(second)).abs().max())


def test_rank_0_writes_checkpoints(lightning_pair: World, tmp_path: Path) -> None:
    assert lightning_pair.run(_checkpoints, tmp_path) == [(["epoch=0.ckpt", "last.ckpt"], 0.0), ([], 0.0)]


def _collectives() -> dict[str, Any]:
    import horovod.torch as hvd
    from horovod.lightning import HorovodStrategy

    strategy = HorovodStrategy(package="lightning")
    strategy.parallel_devices = [torch.device("cpu")] * 2
    own = torch.tensor([1.0 + hvd.rank()], requires_grad=True)
    gathered = strategy.all_gather(own, sync_grads=True)
    (gathered * torch.tensor([[1.0], [3.0]])).sum().backward()
    assert own.grad is not None
    strategy.barrier("a name")
    return {
        "reduced": [
            float(strategy.reduce(own.detach(), reduce_op=op))
            for op in ("mean", "sum", "max", None, torch.distributed.ReduceOp.MIN)
        ],
        "not a tensor": strategy.reduce("text"),
        "gathered": gathered.tolist(),
        "without gradients": strategy.all_gather(own).requires_grad,
        "scalars": strategy.all_gather(own.detach().sum()).tolist(),
        "gradient": own.grad.tolist(),
        "broadcast": strategy.broadcast({"from": hvd.rank()}, src=1),
        "all": strategy.reduce_boolean_decision(hvd.rank() == 0),
        "any": strategy.reduce_boolean_decision(hvd.rank() == 0, all=False),
    }


def test_collectives_of_the_strategy(lightning_pair: World) -> None:
    found = lightning_pair.run(_collectives)
    for rank, gradient in enumerate([2.0, 6.0]):  # the sum over both ranks' losses
        assert found[rank] == {
            "reduced": [1.5, 3.0, 2.0, 3.0, 1.0],
            "not a tensor": "text",
            "gathered": [[1.0], [2.0]],
            "without gradients": False,
            "scalars": [1.0, 2.0],
            "gradient": [gradient],
            "broadcast": {"from": 1},
            "all": False,
            "any": True,
        }


def _metrics() -> dict[str, float]:
    """Logged values are of all ranks: of torchmetrics always, others where the module asks for it."""
    import torchmetrics

    import horovod.torch as hvd

    plain = model("plain", "lightning")

    class Measured(type(plain)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()
            self.all = torchmetrics.CatMetric()

        def validation_step(self, batch: Any, number: int) -> None:
            self.mean.update(float(hvd.rank()))
            self.all.update(torch.arange(1.0 + hvd.rank() * 2))
            self.log("mean", self.mean)
            self.log("synced", float(hvd.rank()), sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            self.log("parts", float(len(self.all.compute())))

    running = trainer("lightning", joined=True)
    running.validate(Measured(), loader(joined=True), verbose=False)
    assert running.world_size == 2
    assert running.global_rank == hvd.rank()
    assert (running.num_nodes, running.num_devices) == (1, 2)
    return {name: float(value) for name, value in running.logged_metrics.items()}


def test_metrics_of_all_ranks(lightning_pair: World) -> None:
    batches = lightning_models.ROWS // lightning_models.TOGETHER
    expected = {"mean": 0.5, "synced": 0.5, "parts": batches * 4.0}
    assert lightning_pair.run(_metrics) == [expected, expected]


def _refused(what: str) -> None:
    import horovod.torch as hvd
    from horovod.lightning import HorovodStrategy

    match what:
        case "package":
            HorovodStrategy()
        case "other package":
            HorovodStrategy(package="keras")
        case "reduce":
            HorovodStrategy(package="lightning").reduce(torch.ones(1), reduce_op="band")
        case "adasum":
            _fitted(HorovodStrategy(package="lightning", op=hvd.Adasum), model("plain", "lightning"))
        case "wrapped":
            plain = model("plain", "lightning")
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(plain.parameters(), lr=0.1))
            plain.configure_optimizers = lambda: optimizer
            _fitted(HorovodStrategy(package="lightning"), plain)


def _fitted(strategy: Any, module: Any) -> None:
    trainer("lightning", joined=False, strategy=strategy).fit(module, loader(joined=True))


REFUSED = {
    "package": (TrainingCode.INVALID_ARGUMENT, "lightning and pytorch_lightning"),
    "other package": (TrainingCode.INVALID_ARGUMENT, "'keras'"),
    "reduce": (TrainingCode.INVALID_ARGUMENT, "'band'"),
    "adasum": (TrainingCode.CONTRADICTORY_ARGUMENTS, "hvd.DistributedOptimizer"),
    "wrapped": (TrainingCode.UNSUPPORTED_OPTIMIZER, "configure_optimizers"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_not_be(lightning_pair: World, what: str) -> None:
    code, fact = REFUSED[what]
    for outcome in lightning_pair.outcomes(_refused, what):
        assert isinstance(outcome.error, ValueError), outcome
        with pytest.raises(ValueError, match=ends_with(code, fact)):
            raise outcome.error
