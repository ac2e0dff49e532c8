"""benchmarks/tensorflow.py measures every operation, trains every model in each way, and compares parameters."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.models import MODELS
from benchmarks.world import ROOT

# Looked for, not imported: this process runs tests of PyTorch as well (see TWIN).
needs_tensorflow = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")


@needs_tensorflow
@pytest.mark.skipif(not shutil.which("cc") and not shutil.which("gcc"), reason="needs a C compiler")
@pytest.mark.timeout(620)
def test_tensorflow_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "results" / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "tensorflow.py"), "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "load of this machine" in done.stdout
    document = json.loads(file.read_text())
    assert document["failures"] == []
    both = {"engine from C", "Horovod"}
    assert set(document["operations"]["call of 1 KB, function"]) == both | {"MultiWorkerMirroredStrategy"}
    ways = {"engine from C, other memory", "Horovod, grouped", "MultiWorkerMirroredStrategy"}
    assert set(document["operations"]["ResNet-50"]) == both | ways
    assert set(document["operations"]["ResNet-50, just computed"]) == both | {"Horovod, grouped"}
    assert set(document["operations"]["ResNet-50, variables"]) == both
    assert [row["operation"] for row in document["rows"]] == list(MODELS)
    for row in document["rows"]:
        assert set(row["distance_from_one_process"]) == {"strategy", "horovod", "each other"}
        assert max(row["distance_from_one_process"].values()) < 1e-3
        assert set(row["figures"]) == {"alone", "strategy", "horovod", "apart"}
        assert None not in row["waiting"].values()
        assert all(figure["values_checked"] >= row["parameters"] for figure in row["figures"].values())
        assert all(rate > 0 for rate in row["samples_per_second"].values())


# In a process of its own: once TensorFlow is loaded, a process that loads Triton, as PyTorch may at any time, crashes,
# because each brings its LLVM. The other way round it works.
TWIN = """
import sys
import torch._dynamo  # loads Triton
from benchmarks import tensorflow_models
from benchmarks.models import TrainingCase, loss_of, make_batch, make_model

for model, tiny in ((model, tiny) for model in sys.argv[1:] for tiny in (True, False)):
    case = TrainingCase(model, 2, tiny=tiny)
    twin = tensorflow_models.Twin(case)
    assert sum(int(variable.shape.num_elements()) for variable in twin.variables) == case.result_elements
    inputs, labels = make_batch(case, 3, 4)
    wanted = loss_of(make_model(case)(inputs), labels).item()
    same_inputs, same_labels = tensorflow_models.make_batch(case, 3, 4)
    found = float(tensorflow_models.loss_of(twin(same_inputs), same_labels))
    assert abs(found - wanted) < 1e-5 * abs(wanted), (model, tiny, found, wanted)
    print(found)
"""


@needs_tensorflow
@pytest.mark.timeout(620)
def test_each_model_computes_what_that_for_pytorch_does() -> None:
    command = [sys.executable, "-c", TWIN, *MODELS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2 * len(MODELS)
