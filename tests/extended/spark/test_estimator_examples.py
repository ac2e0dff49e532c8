"""The examples with estimators, and the one from rows to predictions, learn on one Spark.

Keras is on PyTorch here: other tests take TensorFlow.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
PROGRAM = """
import runpy
import sys
from pyspark.sql import SparkSession
stop, SparkSession.stop = SparkSession.stop, lambda session: None  # the next one goes on with it
for name in sys.argv[1:]:
    sys.argv = [name, "--epochs", "4", "--batch-size", "16"]
    runpy.run_path(name, run_name="__main__")
stop(SparkSession.active())
"""
OPTIONS = "--master local[2] --conf spark.ui.enabled=false pyspark-shell"
NAMES = [
    f"spark_{name}_estimator.py"
    for name, package in {"torch": "torch", "lightning": "lightning", "keras": "keras"}.items()
    if importlib.util.find_spec(package) is not None
]


@pytest.mark.timeout(600)
def test_examples_learn() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(str(EXAMPLES / name) for name in [*NAMES, "spark_etl_torch.py"])],
        env={
            **os.environ,
            "KERAS_BACKEND": "torch",
            "PYSPARK_SUBMIT_ARGS": OPTIONS,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stderr
    accuracies = re.findall(r"^test accuracy: (\d\.\d+)$", done.stdout, re.MULTILINE)
    assert len(accuracies) == len(NAMES), done.stdout
    assert min(map(float, accuracies)) > 0.8
    predicted = re.search(
        r"^predicted (\d+) trips: mean error (\d+\.\d+) minutes, their spread is (\d+\.\d+)$", done.stdout, re.MULTILINE
    )
    assert predicted, done.stdout
    trips, error, spread = map(float, predicted.groups())
    assert 2800 < trips < 3000, "broken rows are left out"
    assert error < spread / 4
