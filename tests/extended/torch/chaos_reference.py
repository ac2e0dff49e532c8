"""What an elastic training must come to: the same steps again in one process, by what each rank has told."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from chaos_rank import EPOCHS, FIRST_WEIGHTS, SAMPLES, Model, digest, follow_the_size, new_optimizer


class History:
    """The shares of all steps in all worlds. A step that was undone is done again in a later world, which counts."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))

    def add(self, asked: dict[str, Any]) -> None:
        """A question of a rank that begins a step."""
        self._steps[asked["step"]][asked["world"]][asked["rank"]] = asked

    def check(self, done: list[dict[str, Any]]) -> int:
        """Every sample counted once, and weights, momentum and learning rate are those of one process, bit for bit.

        done: what the ranks said at the end. Returns the number of steps.
        """
        model = Model(FIRST_WEIGHTS)
        optimizer = new_optimizer(model)
        epochs: dict[int, list[list[int]]] = defaultdict(list)
        total = done[0]["step"]
        for step in range(total):
            world = max(self._steps[step])
            shares = self._steps[step][world]
            size = shares[min(shares)]["size"]
            assert sorted(shares) == list(range(size)), f"step {step} in epoch {world} had shares of {sorted(shares)}"
            follow_the_size(optimizer, size)
            expected = digest(model, optimizer)
            for rank, share in shares.items():
                assert share["digest"] == expected, f"step {step}: rank {rank} of epoch {world} began with other bits"
            samples = [shares[rank]["share"] for rank in range(size)]
            epochs[shares[0]["epoch"]].append([sample for share in samples for sample in share])
            _step(model, optimizer, samples)
        _check_samples(epochs)
        for one in done:
            assert one["seen"] == list(range(total)), one
            follow_the_size(optimizer, one["size"])
            assert one["digest"] == digest(model, optimizer), f"rank {one['rank']} ended with other bits"
        return int(total)


def _step(model: Model, optimizer: Any, shares: list[list[int]]) -> None:
    gradients = []
    for share in shares:
        optimizer.zero_grad()
        model.loss(share).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for parameter, (first, *others) in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
        parameter.grad = sum(others, start=first)  # a sum that starts with 0.0 would lose the sign of -0.0
    optimizer.step()


def _check_samples(epochs: dict[int, list[list[int]]]) -> None:
    """By ElasticSampler's contract: each sample of an epoch once, but for those that fill up its last step."""
    assert sorted(epochs) == list(range(EPOCHS))
    for epoch, steps in epochs.items():
        *before, last = steps
        once = Counter(sample for step in before for sample in step)
        assert max(once.values()) == 1, f"epoch {epoch}: {[sample for sample in once if once[sample] > 1]} twice"
        assert not once.keys() >= set(last), f"epoch {epoch}: all of its last step was done before"
        missing = set(range(SAMPLES)) - once.keys() - set(last)
        assert not missing, f"epoch {epoch}: {sorted(missing)} are missing"
