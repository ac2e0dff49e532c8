"""The elastic examples learn as well as the others when a process is killed on the way, and they run alone."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys
import threading

import psutil
import pytest

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"
HOROVODRUN = [sys.executable, "-m", "horovod.launch", "-np", "2", "--min-np", "1"]
needs_keras = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed")

SCRIPTS = pytest.mark.parametrize(
    "script", ["torch_elastic_digits.py", pytest.param("keras_elastic_digits.py", marks=needs_keras)]
)
LEAST_ACCURACY = {"torch_elastic_digits.py": 0.97, "keras_elastic_digits.py": 0.96}
# So that training goes on while this test finds the process and kills it.
MANY_EPOCHS = {"torch_elastic_digits.py": ["--epochs", "40"], "keras_elastic_digits.py": ["--epochs", "16"]}


def trained_after_a_kill(script: str, *options: str, first: str) -> tuple[str, str]:
    """Output and errors of two processes, of which rank 1 is killed when the line `first` is out, after an epoch."""
    program = [str(EXAMPLES / script), *options]
    launcher = subprocess.Popen(
        [*HOROVODRUN, sys.executable, *program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(250, launcher.kill)
    timer.start()
    try:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == f"[0]<stdout>:{first}\n"
        ranks = {
            process.environ()["HOROVOD_RANK"]: process
            for process in psutil.Process(launcher.pid).children(recursive=True)
            if process.cmdline()[1:] == program
        }
        ranks["1"].kill()
        said, errors = launcher.communicate()
    finally:
        timer.cancel()
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 0, said + errors
    return said, errors


def accuracy_in(said: str) -> float:
    accuracies = re.findall(r"test accuracy: (\d\.\d+)", said)
    assert len(accuracies) == 1, said
    return float(accuracies[0])


@pytest.mark.timeout(300)
@SCRIPTS
def test_a_process_is_killed_on_the_way(script: str) -> None:
    said, errors = trained_after_a_kill(script, *MANY_EPOCHS[script], first="epoch 1 ends with processes: 2")
    assert "ends with processes: 1\n" in said, errors
    assert accuracy_in(said) >= LEAST_ACCURACY[script], said


@pytest.mark.timeout(300)
def test_each_sample_of_an_epoch_counts_once_when_a_process_is_killed(tmp_path: pathlib.Path) -> None:
    options = ["--data", str(tmp_path / "shards"), "--epochs", "10"]
    once = "uses of a sample [0, 1344], processes"  # 0 samples not at all, 1344 once
    said, errors = trained_after_a_kill("torch_elastic_shards.py", *options, first=f"epoch 1: {once} 2")
    *epochs, _ = re.sub(r"^\[\d\]<stdout>:", "", said, flags=re.MULTILINE).splitlines()
    told = [line.partition(": ")[2].rpartition(" ")[0] for line in epochs]
    assert told == [once] * 9, said
    assert f"{once} 1\n" in said, errors
    assert accuracy_in(said) > 0.95, said


@SCRIPTS
def test_it_runs_alone(script: str) -> None:
    command = [sys.executable, str(EXAMPLES / script), "--epochs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=True)
    assert re.fullmatch(r"epoch 1 ends with processes: 1\ntest accuracy: \d\.\d+\n", done.stdout), done.stdout
    ours = done.stderr if script.startswith("torch") else "horovod" in done.stderr  # TensorFlow tells of the processor
    assert not ours, done.stderr
