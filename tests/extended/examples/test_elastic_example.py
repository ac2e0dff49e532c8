"""The elastic example learns as well as the other one when a process is killed on the way, and it runs alone."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import threading

import psutil

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "torch_elastic_digits.py"
COMMAND = [sys.executable, "-m", "horovod.launch", "-np", "2", "--min-np", "1", sys.executable, str(EXAMPLE)]
MANY_EPOCHS = ["--epochs", "40"]  # so that training goes on while this test finds the process and kills it


def test_a_process_is_killed_on_the_way() -> None:
    launcher = subprocess.Popen(
        [*COMMAND, *MANY_EPOCHS], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    timer = threading.Timer(100, launcher.kill)
    timer.start()
    try:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "[0]<stdout>:epoch 1 ends with processes: 2\n"
        ranks = {
            process.environ()["HOROVOD_RANK"]: process
            for process in psutil.Process(launcher.pid).children(recursive=True)
            if process.cmdline()[1:] == [str(EXAMPLE), *MANY_EPOCHS]
        }
        ranks["1"].kill()
        said, errors = launcher.communicate()
    finally:
        timer.cancel()
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 0, said + errors
    assert "ends with processes: 1\n" in said, errors
    accuracies = [float(accuracy) for accuracy in re.findall(r"test accuracy: (\d\.\d+)", said)]
    assert len(accuracies) == 1, said
    assert accuracies[0] >= 0.97, said


def test_it_runs_alone() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--epochs", "1"], capture_output=True, text=True, timeout=100, check=True
    )
    assert re.fullmatch(r"epoch 1 ends with processes: 1\ntest accuracy: \d\.\d+\n", done.stdout), done.stdout
    assert done.stderr == ""
