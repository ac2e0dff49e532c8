"""A training that was killed goes on from its checkpoint, and ends where one ends that was not killed."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "torch_imagenet_resume.py"
EPOCHS = 4


def start(checkpoint: Path) -> subprocess.Popen[str]:
    options = ["--epochs", str(EPOCHS), "--checkpoint", str(checkpoint)]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "horovod.launch",
            "--start-timeout",
            "200",
            "-np",
            "2",
            sys.executable,
            EXAMPLE,
            *options,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines_of(launcher: subprocess.Popen[str]) -> list[str]:
    said, errors = launcher.communicate(timeout=250)
    assert launcher.returncode == 0, said + errors
    return re.sub(r"^\[0\]<stdout>:", "", said, flags=re.MULTILINE).splitlines()


@pytest.mark.timeout(400)
def test_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = lines_of(start(tmp_path / "whole.pt"))
    assert len(whole) == EPOCHS
    accuracy = re.fullmatch(rf"epoch {EPOCHS}: test loss \d\.\d+, test accuracy (\d\.\d+)", whole[-1])
    assert accuracy, whole
    assert float(accuracy[1]) > 0.8

    launcher = start(tmp_path / "killed.pt")
    timer = threading.Timer(250, launcher.kill)
    timer.start()
    try:
        assert launcher.stdout is not None
        begun = [launcher.stdout.readline().removeprefix("[0]<stdout>:").strip() for _ in range(2)]
    finally:
        timer.cancel()
        launcher.kill()
        launcher.communicate()
    assert begun == whole[:2]

    first, *rest = lines_of(start(tmp_path / "killed.pt"))
    done = re.fullmatch(r"goes on after epoch (\d)", first)
    assert done, first
    assert 2 <= int(done[1]) < EPOCHS
    assert rest == whole[int(done[1]) :], "the same losses to the last digit"
