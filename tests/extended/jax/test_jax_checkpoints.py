"""The recipe of docs/jax.md for Orbax, run as it is printed: rank 0 saves, all ranks go on from what it has loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import World

pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")

PAGE = Path(__file__).parents[3] / "docs" / "jax.md"
STOPPED_AT = 25  # after the checkpoint of step 20
LAST = 40


class _StoppedError(Exception):
    """A job that ends in the middle."""


def _recipe() -> str:
    (found,) = re.findall(r"^## Checkpoints$.*?^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def _run(recipe: str, folder: str, stop_at: int) -> tuple[list[int], Any]:
    """The steps that were taken, and the weights after the last one."""
    import jax

    import horovod.jax as hvd

    steps = []

    def train_step(state: Any) -> Any:
        if state["step"] == stop_at:
            raise _StoppedError
        steps.append(state["step"])
        own = jax.tree.map(lambda one: one + 1 + hvd.rank(), state["params"])
        return {"params": hvd.allreduce(own), "step": state["step"] + 1}

    known = {"folder": folder, "last_step": LAST, "train_step": train_step}
    try:
        exec(recipe, known)
    except _StoppedError:
        if known["manager"] is not None:
            known["manager"].wait_until_finished()
            known["manager"].close()
    return steps, np.asarray(known["state"]["params"]["w"])


def test_rank_0_saves_and_all_ranks_go_on_from_there(jax_pair: World, tmp_path: Path) -> None:
    pieces = _recipe(), str(tmp_path / "checkpoints")
    for steps, _ in jax_pair.run(_run, *pieces, STOPPED_AT):
        assert steps == list(range(STOPPED_AT))
    for steps, weights in jax_pair.run(_run, *pieces, -1):
        assert steps == list(range(20, LAST))
        np.testing.assert_array_equal(weights, np.full(3, LAST * 1.5))
    saved = {path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()}
    assert saved == {"10", "20", "30", "40"}
