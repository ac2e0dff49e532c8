"""pytorch-ignite trains with its horovod backend: launched by horovodrun, and by its own spawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = '''
"""Argument: a folder for the results, one file for each rank. With a second argument it spawns its ranks itself."""
import json
import sys
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy


def train(local_rank, folder):
    rank, size = idist.get_rank(), idist.get_world_size()
    torch.manual_seed(rank)  # auto_model must make the ranks equal
    model = idist.auto_model(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5))
    generator = torch.Generator().manual_seed(7)
    points = torch.randn(400, 2, generator=generator)
    classes = (points[:, 0] > points[:, 1]).long()
    mine = [(points[i::size], classes[i::size]) for i in [rank]]
    trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.cross_entropy)
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})

    @trainer.on(Events.COMPLETED)
    def evaluate(_):
        evaluator.run(mine)

    trainer.run(mine, max_epochs=60)
    idist.barrier()
    found = {
        "rank": rank,
        "size": size,
        "backend": idist.backend(),
        "accuracy": evaluator.state.metrics["accuracy"],
        "weights": [float(one) for p in model.parameters() for one in p.detach().flatten()],
        "ranks": idist.all_gather(torch.tensor([rank])).tolist(),
        "optimizer": str(type(optimizer)),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        idist.spawn("horovod", train, args=(sys.argv[1],), nproc_per_node=2)
    else:
        with idist.Parallel(backend="horovod") as parallel:
            parallel.run(train, sys.argv[1])
'''


@pytest.mark.parametrize("spawned", [False, True], ids=["horovodrun", "spawn"])
def test_trains_with_its_horovod_backend(tmp_path: Path, spawned: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command: list[Any] = [sys.executable, script, tmp_path]
    command = [*command, "spawn"] if spawned else [sys.executable, "-m", "horovod.launch", "-np", "2", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOROVOD_START_TIMEOUT": "200"}  # on a busy machine
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, one in enumerate(found):
        assert (one["rank"], one["size"], one["backend"], one["ranks"]) == (rank, 2, "horovod", [0, 1])
        assert "horovod" in one["optimizer"]
        assert one["accuracy"] > 0.9
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["accuracy"] == found[1]["accuracy"]
