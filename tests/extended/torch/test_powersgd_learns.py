"""The digits are learned with the PowerSGD of examples/torch_powersgd.py, with far fewer bytes."""

from __future__ import annotations

from test_powersgd_example import powersgd
from worlds import World


def _trained(rank: int) -> tuple[float, int]:
    """Accuracy, and bytes of tensors that this rank has given to the engine."""
    from horovod.worker.runtime.context import current

    before = current().counters()["bytes"]
    accuracy = powersgd().train(rank, epochs=10)
    return accuracy, current().counters()["bytes"] - before


def test_powersgd_learns_the_digits_with_far_fewer_bytes(pair: World) -> None:
    plain, plain_bytes = pair.run(_trained, 0)[0]
    compressed, compressed_bytes = pair.run(_trained, 2)[0]
    assert plain > 0.95
    assert compressed > plain - 0.02
    assert compressed_bytes < plain_bytes / 15
