"""Which device each rank of a host trains on, without any GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from error_codes import ends_with

from horovod.base.errors import LaunchCode


@pytest.mark.parametrize(
    ("found", "ranks", "seen", "expected"),
    [
        (["cpu"], 2, 0, ["cpu", "cpu"]),
        (["cpu"] * 4, 2, 0, ["cpu", "cpu"]),  # Trainer(devices=4)
        (["cuda:0", "cuda:1"], 2, 2, ["cuda:0", "cuda:1"]),
        (["cuda:2", "cuda:3"], 2, 4, ["cuda:2", "cuda:3"]),
        (["cuda:0", "cuda:1"], 1, 2, ["cuda:0"]),
        (["cuda:0"], 2, 4, ["cuda:0", "cuda:1"]),  # Trainer(devices=1)
        (["cuda:0"], 2, 1, ["cuda:0", "cuda:0"]),  # horovodrun --pin-gpus
    ],
)
def test_one_for_each_rank(
    found: Sequence[str], ranks: int, seen: int, expected: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from horovod.lightning.strategy import devices_of_host

    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    assert [str(one) for one in devices_of_host([torch.device(name) for name in found], ranks)] == list(expected)


@pytest.mark.parametrize(("found", "seen"), [(["cuda:0", "cuda:1"], 2), (["cuda:0"], 2)])
def test_fewer_than_ranks(found: Sequence[str], seen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.lightning.strategy import devices_of_host

    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    with pytest.raises(ValueError, match=ends_with(LaunchCode.TOO_FEW_GPUS, "3 ranks")):
        devices_of_host([torch.device(name) for name in found], 3)
