"""A rank that trains as benchmarks/training.py asks: together with the others through one of its libraries, or plainly,
by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client
from typing import Any

import torch
from torch import nn

from benchmarks.models import TrainingCase, loss_of, make_batch, make_model
from benchmarks.peers import join
from benchmarks.placement import finish, place
from benchmarks.values import WrongValuesError
from benchmarks.worker import serve

_BATCHES = 4
_TIMED_RATE = 1e-4  # random labels can't be learned; small steps keep the weights where arithmetic has its usual speed
_CHECKED_RATE = 0.03
_CHECKED_STEPS = 3
_CPU = torch.device("cpu")
# Of the timed steps: the models' own without one.
_TIMED_DTYPE = torch.bfloat16 if os.environ.get("BENCHMARK_DTYPE") == "bfloat16" else None


@dataclass
class Training:
    """A model, and what trains it for one step on a batch."""

    model: Any  # a torch.nn.Module, or what a trainer of another framework has instead
    step: Callable[[Any, Any], None]
    batches: Sequence[tuple[Any, Any]] = ()


class Trainer:
    """Answers what the harness asks of a rank. `how` is a library, or "plain": without communication.

    One process trains in each way, so that where its memory lies and which processor it got are the same for all.
    """

    def __init__(self, rank: int, size: int, barrier: Callable[[], None], device: torch.device = _CPU) -> None:
        self._device = device
        self._rank = rank
        self._size = size
        self._barrier = barrier
        self._trainings: dict[str, Training] = {}  # by `how`

    def prepare(self, how: str, **case: Any) -> dict[str, Any]:
        given = TrainingCase(**case)
        training = self._training(given, _TIMED_RATE, how)
        numbers = range(self._rank, _BATCHES * self._size, self._size)
        training.batches = [self._batch(given, number, given.batch) for number in numbers]
        self._trainings[how] = training
        return {}

    def drop(self, how: str) -> dict[str, Any]:
        del self._trainings[how]
        return {}

    def run(self, how: str, blocks: int, calls: int) -> dict[str, Any]:
        """Blocks of back-to-back steps; after each, parameters must be finite and, together, the same on all ranks."""
        training = self._trainings[how]
        seconds, checked = [], 0
        for _ in range(blocks):
            finish(self._device)
            self._barrier()
            start = time.perf_counter_ns()
            for number in range(calls):
                training.step(*training.batches[number % _BATCHES])
            finish(self._device)
            seconds.append((time.perf_counter_ns() - start) * 1e-9)
            checked += self._check(training.model, how)
        return {"seconds": seconds, "checked": checked, "barriers": []}

    def verify(self, how: str, file: str, joined: int, **case: Any) -> dict[str, Any]:
        """A few large steps from the first weights, written to `file` with what they began as.

        joined: ranks whose batches make one. A rank takes its own part of it, one that is alone takes it all.
        """
        given = TrainingCase(**case)
        # Half precision rounds a rank's part of the batch otherwise than the whole of it.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        training = self._training(given, _CHECKED_RATE, how, dtype=None)
        before = self._parameters(training.model)
        rows = joined * given.batch // self._size
        own = slice(self._rank * rows, (self._rank + 1) * rows)
        for number in range(_CHECKED_STEPS):
            inputs, labels = self._batch(given, number, joined * given.batch)
            training.step(inputs[own], labels[own])
        self._check(training.model, how)
        if self._rank == 0:
            torch.save({"before": before.cpu(), "after": self._parameters(training.model).cpu()}, file)
        return {}

    def _batch(self, case: TrainingCase, number: int, samples: int) -> tuple[Any, Any]:
        inputs, labels = make_batch(case, number, samples)
        return inputs.to(self._device), labels.to(self._device)

    def _training(
        self, case: TrainingCase, rate: float, how: str, dtype: torch.dtype | None = _TIMED_DTYPE
    ) -> Training:
        model = make_model(case).to(self._device)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        called: Callable[..., torch.Tensor] = model
        if how == "ddp":
            called = nn.parallel.DistributedDataParallel(model)
        elif how == "horovod":
            import horovod.torch as hvd

            # A case's name is in those of its gradients: another model's tensors of the same name have other shapes.
            named = [(f"{case.operation}.{name}", parameter) for name, parameter in model.named_parameters()]
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)

        def step(inputs: torch.Tensor, labels: torch.Tensor) -> None:
            optimizer.zero_grad()
            with torch.autocast(self._device.type, dtype, enabled=dtype is not None):
                loss = loss_of(called(inputs), labels)
            loss.backward()
            optimizer.step()

        return Training(model, step)

    def _check(self, model: Any, how: str) -> int:
        """How many parameters there are, all finite and the same on all ranks that train together."""
        parameters = self._parameters(model)
        if not bool(parameters.isfinite().all()):
            raise WrongValuesError("a parameter is not finite")
        digest = hashlib.sha256(parameters.cpu().numpy().tobytes()).hexdigest()
        if len(set(self._of_all_ranks(digest, how))) != 1:
            raise WrongValuesError("the ranks' parameters differ")
        return parameters.numel()

    def _parameters(self, model: Any) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    def _of_all_ranks(self, digest: str, how: str) -> list[Any]:
        """Of those that train together; a rank that trains plainly is alone."""
        digests: list[Any] = [digest]
        if how == "ddp":
            digests = [None] * self._size
            torch.distributed.all_gather_object(digests, digest)
        elif how == "horovod":
            import horovod.torch as hvd

            digests = hvd.allgather_object(digest, name="digest")
        return digests


def main() -> None:
    torch.set_num_threads(1)
    connection = Client(os.environ["BENCHMARK_SOCKET"], "AF_UNIX")
    rank, size = int(os.environ["BENCHMARK_RANK"]), int(os.environ["BENCHMARK_SIZE"])
    device = place(size)
    libraries = [name for name in os.environ["BENCHMARK_LIBRARIES"].split(",") if name]
    peers = {name: join(name, size, device) for name in libraries}
    version = ", ".join([f"torch {torch.__version__}", *(f"{name} {peer.version}" for name, peer in peers.items())])
    connection.send_bytes(json.dumps({"rank": rank, "pid": os.getpid(), "version": version}).encode())
    barrier = next(iter(peers.values())).barrier if peers else lambda: None
    serve(connection, Trainer(rank, size, barrier, device))
    connection.close()
    for peer in peers.values():
        peer.close()


if __name__ == "__main__":
    main()
