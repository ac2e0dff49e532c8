"""What libraries on top of torch.distributed compute with the backend "horovod" and with gloo; run by torchrun.

Argument: a folder. Each rank writes RANK.json there: for each backend and
each library what it found. A library that is not installed is left out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import horovod.torch.distributed  # noqa: F401  (registers the backend)

CASES: dict[str, Callable[[str, Path], Any]] = {}


def case(function: Callable[[str, Path], Any]) -> Callable[[str, Path], Any]:
    """A function of that name as its library, which is given the backend's name and a folder."""
    if importlib.util.find_spec(function.__name__.split("__")[0]) is not None:
        CASES[function.__name__] = function
    return function


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 2))


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(7)
    points = torch.randn(64, 8, generator=generator)
    return torch.utils.data.TensorDataset(points, points[:, :2] - points[:, 2:4])


def weights(trained: torch.nn.Module) -> list[float]:
    return [
        value
        for parameter in trained.parameters()
        for value in (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).flatten().tolist()
    ]


def _fit(strategy: Any, folder: Path) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model()

        def configure_model(self) -> None:
            if isinstance(self.trainer.strategy, lightning.pytorch.strategies.ModelParallelStrategy):
                from torch.distributed.fsdp import fully_shard

                fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> Any:
            loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=8))
    file = folder / "end.ckpt"
    trainer.save_checkpoint(file)
    return float(trainer.callback_metrics["loss"]), weights(module), file.exists()


@case
def lightning(backend: str, folder: Path) -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    return _fit(DDPStrategy(process_group_backend=backend), folder)


@case
def lightning__fully_sharded(backend: str, folder: Path) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return _fit(ModelParallelStrategy(process_group_backend=backend), folder)


@case
def accelerate(backend: str, folder: Path) -> Any:
    import accelerate
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == dist.get_world_size() == 2
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data(), batch_size=8)
    wrapped, optimizer, loader = accelerator.prepare(trained, optimizer, loader)
    for points, targets in loader:
        with accelerator.accumulate(wrapped):
            loss = torch.nn.functional.mse_loss(wrapped(points), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    losses = accelerator.gather_for_metrics(loss.detach().reshape(1)).tolist()
    uneven = accelerator.pad_across_processes(torch.ones(accelerator.process_index + 1), dim=0)
    words = accelerate.utils.gather_object([f"rank {accelerator.process_index}"])
    accelerator.save_state(str(folder / "state"))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(folder / "state"))
    return type(wrapped).__name__, losses, uneven.tolist(), words, weights(accelerator.unwrap_model(wrapped))


@case
def transformers(backend: str, folder: Path) -> Any:
    import transformers

    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    trained = transformers.BertForSequenceClassification(config)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 32, (32, 6), generator=generator)
    rows = [{"input_ids": row, "labels": int(row[0] > 15)} for row in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="steps",
        save_steps=4,
        disable_tqdm=True,
        logging_strategy="no",
    )
    assert arguments.world_size == 2
    trainer = transformers.Trainer(model=trained, args=arguments, train_dataset=rows, eval_dataset=rows)
    loss = trainer.train().training_loss
    evaluated = trainer.evaluate()["eval_loss"]
    return loss, evaluated, sorted(path.name for path in (folder / "out").iterdir()), weights(trained)


@case
def torchmetrics(backend: str, folder: Path) -> Any:
    import torchmetrics

    rank = dist.get_rank()
    accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
    accuracy.update(torch.tensor([0, 1, 2, 2][: 2 + 2 * rank]), torch.tensor([0, 1, 1, 1][: 2 + 2 * rank]))
    gathered = torchmetrics.CatMetric()
    gathered.update(torch.arange(2.0 + rank) + 10 * rank)  # of other lengths on the ranks
    return accuracy.compute().item(), gathered.compute().tolist()


@case
def torchdata(backend: str, folder: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def made() -> Any:
        sampler = torch.utils.data.DistributedSampler(data(), shuffle=True, seed=3)
        return StatefulDataLoader(data(), batch_size=4, sampler=sampler)

    loader = made()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, loader.state_dict())
    resumed = made()
    resumed.load_state_dict(states[dist.get_rank()])
    left = torch.cat([points for points, _ in resumed])
    expected = torch.cat([points for points, _ in iterator])
    assert torch.equal(left, expected)
    everyone = [torch.empty_like(left) for _ in states]
    dist.all_gather(everyone, left)
    return [one.sum().item() for one in everyone]


def found(backend: str, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, function in CASES.items():
        place = folder / f"{backend}-{name}"
        place.mkdir(exist_ok=True)
        results[name] = function(backend, place)
    return results


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    results = {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # torchrun's
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    results["gloo"] = found("gloo", folder)
    dist.destroy_process_group()
    if "lightning" not in CASES:  # which begins the group itself; the other cases find one that has begun
        dist.init_process_group("horovod")
    results["horovod"] = found("horovod", folder)
    results["backend"] = dist.get_backend()
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
