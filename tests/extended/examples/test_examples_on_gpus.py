"""The examples that compute on GPUs: on real ones, and which GPU they take, pinned or not, where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
# Of two ranks that import a framework on a busy machine, one may be half a minute later.
HOROVODRUN = [sys.executable, "-m", "horovod.launch", "--start-timeout", "200"]
SCRIPTS = {"torch_digits.py": 0.97, "torch_resnet.py": 0.9}
ALONE_WITH_NCCL = 'NCCL_HOSTID=horovod-test-$HOROVOD_RANK exec "$0" "$@"'


# An example that ends when it has chosen, on a host that has as many GPUs as CUDA_VISIBLE_DEVICES names.
CHOOSE = """
import os, runpy, sys
import torch

visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")

def set_device(number):
    print(f"GPU {visible[number]}")
    sys.exit()

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: len(visible)
torch.cuda.set_device = set_device
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=380,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("options", [[], ["--pin-gpus"]], ids=["all-visible", "pinned"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_each_process_takes_a_gpu_of_its_own(tmp_path: Path, script: str, options: list[str]) -> None:
    program = tmp_path / "choose.py"
    program.write_text(CHOOSE)
    command = [*HOROVODRUN, "-np", "3", *options, sys.executable, str(program), str(EXAMPLES / script)]
    said = run(command, CUDA_VISIBLE_DEVICES="5,2,7")
    assert sorted(said.splitlines()) == [f"[{rank}]<stdout>:GPU {gpu}" for rank, gpu in enumerate((5, 2, 7))]


@pytest.mark.parametrize("options", [[], ["--pin-gpus"]], ids=["all-visible", "pinned"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script", SCRIPTS)
def test_on_cuda(script: str, ranks: int, options: list[str]) -> None:
    """By NCCL, without which this fails. Ranks that share a GPU are hosts of their own to it."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    program = [sys.executable, str(EXAMPLES / script)]
    if ranks > torch.cuda.device_count():
        if options:
            pytest.skip(f"{ranks} processes can't have a GPU of their own: there are {torch.cuda.device_count()}")
        program = ["sh", "-c", ALONE_WITH_NCCL, *program]
    said = run([*HOROVODRUN, "-np", str(ranks), *options, *program], HOROVOD_GPU_OPERATIONS="nccl")
    found = re.search(r"test accuracy: (\d\.\d+)", said)
    assert found, said
    assert float(found[1]) >= SCRIPTS[script]
