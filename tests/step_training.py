"""Trains by state.step() while ranks are killed at random moments, and checks that no step and no sample was lost.

    python tests/step_training.py --size 4 --kills 200

Each process but one may end by SIGKILL at any moment, in whatever it does; another takes its place. Gradients are whole
numbers that depend on the weights, so that their sum is exact in any order: one process that takes the same steps alone
must get the same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH = 16
MORE_STEPS = 20  # once all that were killed have been replaced
WAIT_S = 0.3  # within which a process is killed, on average, once it trains


@dataclass(frozen=True)
class Taken:
    """A step: its number, the first of its samples, and how many ranks took one of these each."""

    step: int
    first: int
    size: int


def _model() -> tuple[Any, Any]:
    import torch

    weights = torch.nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
    model = torch.nn.ParameterList([weights])
    return model, torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


def _loss(weights: Any, sample: int) -> Any:
    """Its gradient is whole numbers, which depend on the weights."""
    import torch

    row = (torch.arange(WIDTH, dtype=torch.float64) * (sample + 1)) % 7 - 3
    return (weights * row * torch.floor(weights.detach().abs()).remainder(5.0).add(1.0)).sum()


def alone(steps: list[Taken]) -> list[float]:
    """The weights of one process that takes these steps."""
    model, optimizer = _model()
    for taken in steps:
        optimizer.zero_grad()
        for sample in range(taken.first, taken.first + taken.size):
            _loss(model[0], sample).backward()
        optimizer.step()
    weights: list[float] = model[0].tolist()
    return weights


class _Death:
    """Ends this process at a random moment, if as many as are to be killed have not been killed yet."""

    def __init__(self, folder: Path, kills: int, seed: int) -> None:
        self._file = folder / "kills"
        self._kills = kills
        self._seconds = random.Random(f"{seed} {os.getpid()}").expovariate(1 / WAIT_S)

    def done(self) -> int:
        return self._file.stat().st_size if self._file.exists() else 0

    def arm(self) -> None:
        timer = threading.Timer(self._seconds, self._come)
        timer.daemon = True
        timer.start()

    def _come(self) -> None:
        if self.done() < self._kills:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(descriptor, b"x")
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, kills: int, seed: int) -> dict[str, Any]:
    """What each rank does."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    number, whole = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_MAX_SIZE"])
    death = _Death(Path(folder), kills, seed)
    model, optimizer = _model()
    optimizer = hvd.DistributedOptimizer(optimizer, [("weights", model[0])], op=hvd.Sum)
    state = hvd.elastic.TorchState(model, optimizer, steps=0, position=0, more=MORE_STEPS)
    log = os.open(Path(folder) / f"{number}.{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    if number != seed % whole:  # the others hold the state if all that may die do
        death.arm()

    @hvd.elastic.run
    def run(state: Any) -> None:
        while state.more > 0:
            optimizer.zero_grad()
            first = state.position
            _loss(model[0], first + hvd.rank()).backward()
            is_over = death.done() >= kills and hvd.size() == whole
            over = hvd.allreduce(torch.tensor([int(is_over)]), op=hvd.Min, name="over")
            state.position += hvd.size()
            state.steps += 1
            state.more -= int(over)
            line = json.dumps([state.steps, first, state.position - first]) + "\n"
            state.step(functools.partial(os.write, log, line.encode()))

    run(state)
    return {"weights": model[0].tolist(), "steps": state.steps, "position": state.position}


def chain(records: set[Taken], steps: int, position: int) -> list[Taken]:
    """The steps that lead to this position. AssertionError: one is missing, or took samples that another one took.

    A rank may have taken a step, and written so, and died with it before another one had.
    """
    ends: dict[tuple[int, int], list[Taken]] = {}
    for one in records:
        ends.setdefault((one.step, one.first + one.size), []).append(one)
    ways: list[list[Taken]] = [[]]
    for step in range(steps, 0, -1):
        ways = [[before, *way] for way in ways for before in ends.get((step, way[0].first if way else position), [])]
        assert ways, f"no rank has taken step {step} before those that follow"
    whole = [way for way in ways if not way or way[0].first == 0]
    assert whole, "the first samples are missing"
    return whole[0]


def chaos(folder: Path, *, size: int, kills: int, seed: int, transport: str = "shm") -> int:
    """Trains in worlds of 2 to `size` ranks. Returns how many ranks were killed."""
    from worlds import World

    environment = {"HOROVOD_MIN_SIZE": str(min(2, size - 1)), "HOROVOD_MAX_SIZE": str(size)}
    with World(size, transport, environment) as world:
        outcomes = world.outcomes(
            train, str(folder), kills, seed, before_replacing=[lambda: None] * kills, deadline_seconds=60.0 + 10 * kills
        )
    assert [outcome.text for outcome in outcomes] == [""] * size
    results = [outcome.value for outcome in outcomes]
    assert all(result == results[0] for result in results), results
    records = {
        Taken(*json.loads(line))
        for path in folder.glob("*.*")
        for line in path.read_text().splitlines()
        if line.endswith("]")
    }
    steps = chain(records, results[0]["steps"], results[0]["position"])
    assert alone(steps) == results[0]["weights"]
    return (folder / "kills").stat().st_size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains while ranks are killed, and checks what they have trained.")
    parser.add_argument("--size", type=int, default=4, help="ranks of the largest world (default: 4)")
    parser.add_argument("--kills", type=int, default=200, help="how many ranks to kill (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    arguments = parser.parse_args()
    sys.path[:0] = [str(Path(__file__).parent / "torch"), str(Path(__file__).parents[1])]
    with tempfile.TemporaryDirectory() as directory:
        done = chaos(Path(directory), size=arguments.size, kills=arguments.kills, seed=arguments.seed)
    print(f"{done} ranks were killed. Each step and each sample counts once; the weights equal those of one process.")
