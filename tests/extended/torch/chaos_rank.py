"""What each rank of the real chaos does: it trains, and asks the test at every turn whether it may go on.

The test has nothing to wait for but these questions, so what it does happens at a known point of the training. A
gradient is rounded to a grid on which sums are exact, so that the weights do not depend on the order in which ranks are
added up, and one process can compute them again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

# Whether there are GPUs must not be found out by asking CUDA, which no child of the fork server could use after that.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
import torch
import torch._dynamo

import horovod.torch as hvd
import horovod.worker.runtime.session  # noqa: F401 (what each child would import by itself)
from horovod.common import basics
from horovod.worker.runtime import formation, host, witness
from horovod.worker.runtime.context import current, is_member

SAMPLES = 44
EPOCHS = 3
BATCH = 2  # samples of a rank in a step
GRID = 2.0**24
FIRST_WEIGHTS = 0  # the seed of those with which the training begins; what newcomers bring must not matter


class _Rounded(torch.autograd.Function):
    """The weight itself, with a gradient on the grid."""

    @staticmethod
    def forward(_: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.round(gradient * GRID) / GRID


class Model(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.nn.Parameter(torch.randn(6, 5, dtype=torch.float64, generator=generator))
        self.last = torch.nn.Parameter(torch.randn(5, dtype=torch.float64, generator=generator))

    def loss(self, indices: Sequence[int]) -> torch.Tensor:
        rows = torch.tensor([[(index * (k + 3)) % 7 - 3.0 for k in range(6)] for index in indices], dtype=torch.float64)
        said = torch.tanh(rows @ _Rounded.apply(self.first)) @ _Rounded.apply(self.last)
        return (said - rows[:, 0].sin()).square().sum() / 8


def new_optimizer(model: Model) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.75)


def follow_the_size(optimizer: torch.optim.Optimizer, size: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * size


def digest(model: Model, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit of weights, momentum and learning rate."""
    bits = hashlib.sha256()
    state = optimizer.state_dict()
    for number, parameter in enumerate(model.parameters()):
        bits.update(parameter.detach().numpy().tobytes())
        momentum = state["state"].get(number, {}).get("momentum_buffer")
        bits.update(b"" if momentum is None else momentum.numpy().tobytes())
    bits.update(repr([group["lr"] for group in state["param_groups"]]).encode())
    return bits.hexdigest()[:16]


class Questions:
    """Asks the test, and waits until it answers."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    def ask(self, at: str, **facts: Any) -> str:
        if is_member():
            world = current().world
            facts |= {"world": world.epoch, "rank": world.rank, "size": world.size}
        self._socket.send(json.dumps({"at": at, **facts}).encode())
        answer = self._socket.recv(100).decode()
        if not answer:
            os._exit(1)  # the test is gone
        return answer


def _ask_before(module: Any, function: str, ask: Any) -> None:
    original = getattr(module, function)

    def asking(*arguments: Any, **options: Any) -> Any:
        ask()
        return original(*arguments, **options)

    setattr(module, function, asking)


def forked(descriptors: list[int], host_name: str) -> None:
    """A rank on the host of this name. descriptors: where it asks, and for what it says."""
    torch.set_num_threads(1)
    os.dup2(descriptors[1], 2)
    os.close(descriptors[1])
    seen = host.process_namespace() + host_name
    # Those of another host do not see its processes, nor share memory with them.
    host.process_namespace = witness.process_namespace = lambda: seen
    _train(Questions(descriptors[0]))


def _train(questions: Questions) -> None:
    ask = questions.ask
    _ask_before(formation, "choose_transport", lambda: ask("forms"))
    hvd.init()
    _ask_before(basics, "init", lambda: ask("joins"))

    model = Model(int(os.environ["WEIGHTS"]))
    inner = new_optimizer(model)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Sum)
    follow_the_size(optimizer, hvd.size())
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES), seed=int(os.environ["SEED"]))

    class State(hvd.elastic.TorchState):
        batch: int

        def check_host_updates(self) -> None:
            """Called by commit(), between what it does alone and what it does with the others."""
            ask("saved", step=self.batch)
            super().check_host_updates()

    state = State(model, optimizer, sampler=sampler, epoch=0, batch=0, seen=[])
    state.register_reset_callbacks([lambda: follow_the_size(optimizer, hvd.size()), lambda: ask("reset")])
    batches_per_commit = int(os.environ["BATCHES_PER_COMMIT"])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < EPOCHS:
            indices = iter(sampler)
            while share := list(itertools.islice(indices, BATCH)):
                before = {"step": state.batch, "epoch": state.epoch, "share": share, "digest": digest(model, inner)}
                for number in itertools.count():
                    if ask("batch", number=number, **before) != "commit":
                        break
                    state.commit()
                optimizer.zero_grad()
                model.loss(share).backward()
                ask("backward", step=state.batch)
                optimizer.step()
                sampler.record_batch(state.batch, len(share))
                state.seen.append(state.batch)
                state.batch += 1
                if state.batch % batches_per_commit == 0:
                    state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    ask("done", step=state.batch, digest=digest(model, inner), seen=state.seen)
