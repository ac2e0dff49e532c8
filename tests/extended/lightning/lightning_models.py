"""Modules for either name of Lightning, and how they are trained: by two ranks, or by one process on what both have."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ROWS, TOGETHER = 40, 8  # of the data, and of the batch of both ranks


def trainer(package: str, joined: bool, **options: Any) -> Any:
    """joined: one of two ranks; else a process alone."""
    from horovod.lightning import HorovodStrategy

    strategy = {"strategy": HorovodStrategy(package=package)} if joined else {}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    given = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "use_distributed_sampler": False}
    return importlib.import_module(_module(package)).Trainer(**{**quiet, **given, **strategy, **options})


def loader(joined: bool) -> DataLoader[Any]:
    """Batches that are those of one process, once those of both ranks are put together."""
    import horovod.torch as hvd

    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(ROWS, 4, generator=draw)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    if not joined:
        return DataLoader(data, batch_size=TOGETHER)
    sampler: DistributedSampler[Any] = DistributedSampler(data, hvd.size(), hvd.rank(), shuffle=False)
    return DataLoader(data, batch_size=TOGETHER // hvd.size(), sampler=sampler)


def model(kind: str, package: str) -> Any:
    """The same on each rank but for rank 0's parameters, which are to count."""
    made = _classes(package)[kind]()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 2)
    return made


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().double().reshape(-1) for value in module.state_dict().values()])


def _module(package: str) -> str:
    return {"lightning": "lightning.pytorch"}.get(package, package)


@functools.cache
def _classes(package: str) -> dict[str, type]:
    base: Any = importlib.import_module(_module(package)).LightningModule

    class Plain(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), *self.between(), nn.Tanh(), nn.Linear(8, 1))

        def between(self) -> Sequence[nn.Module]:
            return ()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            inputs, targets = batch
            return nn.functional.mse_loss(self.net(inputs), targets)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    class Unused(Plain):
        """Has parameters that no loss uses."""

        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)

    class Normalized(Plain):
        def between(self) -> Sequence[nn.Module]:
            return (nn.BatchNorm1d(8),)

    class Searching(Plain):
        """Its optimizer calls the closure several times, and decides by the loss."""

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    class Frozen(Plain):
        """The first layer comes to the optimizer after the first epoch."""

        def configure_optimizers(self) -> Any:
            self.net[0].requires_grad_(False)
            return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[0].requires_grad_(True)
                self.trainer.optimizers[0].add_param_group({"params": list(self.net[0].parameters()), "lr": 0.2})

    class Manual(Plain):
        """Two optimizers; the first one takes a step in every second batch, of the gradients of both."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.critic = nn.Linear(4, 1)

        def training_step(self, batch: Any, number: int) -> None:
            inputs, targets = batch
            first, second = self.optimizers()
            with first.toggle_model(sync_grad=number % 2 == 1):
                self.manual_backward(nn.functional.mse_loss(self.net(inputs), targets))
            if number % 2 == 1:
                first.step()
                first.zero_grad()
            second.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.critic(inputs), self.net(inputs).detach()))
            self.clip_gradients(second, 0.5)
            second.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.net.parameters(), lr=0.1), torch.optim.SGD(self.critic.parameters(), lr=0.1)

    return {
        "plain": Plain,
        "unused": Unused,
        "normalized": Normalized,
        "searching": Searching,
        "frozen": Frozen,
        "manual": Manual,
    }
