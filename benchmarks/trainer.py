"""A rank that trains as benchmarks/training.py asks: together with the others through its library, or apart from them.

A rank of the library "plain" has no others.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client
from typing import Any

import torch
from torch import nn

from benchmarks.models import TrainingCase, loss_of, make_batch, make_model
from benchmarks.peers import Peer, join
from benchmarks.values import WrongValuesError
from benchmarks.worker import serve

_BATCHES = 4
_TIMED_RATE = 1e-4  # random labels can't be learned; small steps keep the weights where arithmetic has its usual speed
_CHECKED_RATE = 0.03
_CHECKED_STEPS = 3


class Alone:
    """One process without any library."""

    version = f"torch {torch.__version__}"

    def __init__(self) -> None:
        self.rank = int(os.environ["BENCHMARK_RANK"])

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Training:
    """A model, and what trains it for one step on a batch."""

    model: nn.Module
    step: Callable[[torch.Tensor, torch.Tensor], None]
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()


class Trainer:
    """Answers what the harness asks of a rank. `apart`: without communication, while the others do the same."""

    def __init__(self, library: str, peer: Peer | Alone, size: int) -> None:
        self._library = library
        self._peer = peer
        self._size = size
        self._trainings: dict[bool, Training] = {}  # by `apart`

    def prepare(self, apart: bool = False, **case: Any) -> dict[str, Any]:
        given = TrainingCase(**case)
        training = self._training(given, _TIMED_RATE, apart)
        numbers = range(self._peer.rank, _BATCHES * self._size, self._size)
        training.batches = [make_batch(given, number, given.batch) for number in numbers]
        self._trainings[apart] = training
        return {}

    def drop(self, apart: bool = False) -> dict[str, Any]:
        del self._trainings[apart]
        return {}

    def run(self, blocks: int, calls: int, apart: bool = False) -> dict[str, Any]:
        """Blocks of back-to-back steps; after each, parameters must be finite and, together, the same on all ranks."""
        training = self._trainings[apart]
        seconds, checked = [], 0
        for _ in range(blocks):
            self._peer.barrier()
            start = time.perf_counter_ns()
            for number in range(calls):
                training.step(*training.batches[number % _BATCHES])
            seconds.append((time.perf_counter_ns() - start) * 1e-9)
            checked += self._check(training.model, apart)
        return {"seconds": seconds, "checked": checked, "barriers": []}

    def verify(self, file: str, joined: int, **case: Any) -> dict[str, Any]:
        """A few large steps from the first weights, written to `file` with what they began as.

        joined: ranks whose batches make one. A rank takes its own part of it, one that is alone takes it all.
        """
        given = TrainingCase(**case)
        training = self._training(given, _CHECKED_RATE)
        before = _flat(training.model)
        rows = joined * given.batch // self._size
        own = slice(self._peer.rank * rows, (self._peer.rank + 1) * rows)
        for number in range(_CHECKED_STEPS):
            inputs, labels = make_batch(given, number, joined * given.batch)
            training.step(inputs[own], labels[own])
        self._check(training.model)
        if self._peer.rank == 0:
            torch.save({"before": before, "after": _flat(training.model)}, file)
        return {}

    def _training(self, case: TrainingCase, rate: float, apart: bool = False) -> Training:
        model = make_model(case)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        called: Callable[..., torch.Tensor] = model
        if self._library == "ddp" and not apart:
            called = nn.parallel.DistributedDataParallel(model)
        elif self._library == "horovod" and not apart:
            import horovod.torch as hvd

            # A case's name is in those of its gradients: another model's tensors of the same name have other shapes.
            named = [(f"{case.operation}.{name}", parameter) for name, parameter in model.named_parameters()]
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)

        def step(inputs: torch.Tensor, labels: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss_of(called(inputs), labels).backward()
            optimizer.step()

        return Training(model, step)

    def _check(self, model: nn.Module, apart: bool = False) -> int:
        """How many parameters there are, all finite and the same on all ranks that train together."""
        parameters = _flat(model)
        if not bool(parameters.isfinite().all()):
            raise WrongValuesError("a parameter is not finite")
        digest = hashlib.sha256(parameters.numpy().tobytes()).hexdigest()
        digests: list[Any] = [digest]
        if self._library == "ddp" and not apart:
            digests = [None] * self._size
            torch.distributed.all_gather_object(digests, digest)
        elif self._library == "horovod" and not apart:
            import horovod.torch as hvd

            digests = hvd.allgather_object(digest, name="digest")
        if len(set(digests)) != 1:
            raise WrongValuesError("the ranks' parameters differ")
        return parameters.numel()


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main() -> None:
    torch.set_num_threads(1)
    connection = Client(os.environ["BENCHMARK_SOCKET"], "AF_UNIX")
    library, size = sys.argv[1], int(os.environ["BENCHMARK_SIZE"])
    peer = Alone() if library == "plain" else join("gloo" if library == "ddp" else library, size)
    hello = {"rank": peer.rank, "pid": os.getpid(), "version": peer.version}
    connection.send_bytes(json.dumps(hello).encode())
    serve(connection, Trainer(library, peer, size))
    connection.close()
    peer.close()


if __name__ == "__main__":
    main()
