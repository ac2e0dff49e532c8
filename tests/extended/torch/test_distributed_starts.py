"""The backend of torch.distributed forms its world under torchrun and under horovodrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch, torch.distributed as dist
import horovod.torch as hvd, horovod.torch.distributed
dist.init_process_group("horovod", init_method=sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()
assert (rank, size) == (hvd.rank(), hvd.size())
tensor = torch.tensor([10.0**rank])
dist.all_reduce(tensor)
group = dist.new_group([0, 2])
if rank != 1:
    dist.all_reduce(tensor, group=group)
sys.stdout.write(f"rank {rank}: {tensor.item():g} {dist.get_backend()}\\n")
dist.destroy_process_group()
assert not hvd.is_initialized()
"""
STARTS = {
    "torchrun": (["torch.distributed.run", "--nproc-per-node", "3"], "env://"),
    "horovodrun": (["horovod.launch", "-np", "3", sys.executable], "horovod://"),
}


@pytest.mark.parametrize("launcher", STARTS)
def test_a_launcher(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command, method = STARTS[launcher]
    run = subprocess.run(
        [sys.executable, "-m", *command, str(tmp_path / "train.py"), method],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    for rank, value in enumerate((222, 111, 222)):
        assert f"rank {rank}: {value} horovod" in run.stdout
