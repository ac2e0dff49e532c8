"""What type checkers see of the installed package, and what help() shows: signatures and results as they are."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from other_release import install

LIMIT_S = 300
# A script, and the types that its reveal_type() calls report, in order. Of each type's name only the last part counts.
SCRIPTS = {
    "torch": (
        """
import torch
import horovod.torch as hvd

def train(model: torch.nn.Module, optimizer: torch.optim.SGD) -> torch.optim.SGD:
    hvd.init(size=1)
    reveal_type(hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average))
    reveal_type(hvd.allreduce(torch.ones(2), op=hvd.Sum))
    reveal_type(hvd.reducescatter(torch.ones(2)))
    reveal_type(hvd.rank())
    reveal_type(hvd.Average)
    reveal_type(hvd.broadcast_object({"a": 1}))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    reveal_type(hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0))
    hvd.shutdown()
    return hvd.DistributedOptimizer(optimizer)
""",
        ["SGD", "Tensor", "Tensor", "int", "int", "dict[str, int]", "TorchState"],
    ),
    "jax": (
        """
import optax
import horovod.jax as hvd

reveal_type(hvd.DistributedOptimizer(optax.adam(1e-3), op=hvd.Average))
""",
        ["GradientTransformationExtraArgs"],
    ),
    "keras": (
        """
import keras
import horovod.keras as hvd

reveal_type(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Average))
reveal_type(hvd.size())
hvd.callbacks.BroadcastGlobalVariablesCallback(0)
""",
        ["SGD", "int"],
    ),
    "tensorflow": (
        """
import tensorflow as tf
import horovod.tensorflow as hvd

with tf.GradientTape() as tape:
    pass
reveal_type(hvd.DistributedGradientTape(tape, op=hvd.Sum))
""",
        ["GradientTape"],
    ),
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of an environment where the package is a folder of site-packages: type checkers do not follow an editable one."""
    return install(tmp_path_factory.mktemp("environment"), "1.97.3")


def written(folder: Path, framework: str) -> tuple[Path, list[str]]:
    if importlib.util.find_spec("optax" if framework == "jax" else framework) is None:
        pytest.skip(f"{framework} is not installed")
    source, types = SCRIPTS[framework]
    path = folder / f"with_{framework}.py"
    path.write_text(source.lstrip())
    return path, types


def needs(checker: str) -> None:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")


def test_mypy_strict_finds_nothing_and_knows_the_types(python: str, tmp_path: Path) -> None:
    """Of PyTorch alone: the other frameworks tell mypy nothing of their types."""
    needs("mypy")
    path, types = written(tmp_path, "torch")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-color-output", "--python-executable", python, path.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [one.split(".")[-1] for one in re.findall(r'Revealed type is "(.*)"', done.stdout)] == types


@pytest.mark.parametrize("framework", SCRIPTS)
def test_pyright_knows_the_types_and_all_public_names(python: str, tmp_path: Path, framework: str) -> None:
    needs("basedpyright")
    path, types = written(tmp_path, framework)
    ask = f"import horovod.{framework} as hvd; print(*hvd.__all__)"
    public = subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True, timeout=LIMIT_S)
    with path.open("a") as file:
        file.writelines(f"hvd.{name}\n" for name in public.stdout.split())
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", python, path.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    said = json.loads(done.stdout)["generalDiagnostics"]
    # Keras and TensorFlow make some of their names at run time, of which pyright knows nothing.
    errors = [one for one in said if one["severity"] == "error" and "horovod" in one["message"]]
    assert not errors, errors
    revealed = [one["message"] for one in said if one["severity"] == "information"]
    assert [re.search(r'is "(.*)"$', one)[1] for one in revealed] == types  # type: ignore[index]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("torch", "DistributedOptimizer reducescatter grouped_reducescatter_async"),
        ("tensorflow", "DistributedOptimizer DistributedGradientTape PartialDistributedGradientTape reducescatter"),
        ("keras", "DistributedOptimizer PartialDistributedOptimizer reducescatter"),
        ("tensorflow.keras", "DistributedOptimizer PartialDistributedOptimizer reducescatter"),
        ("jax", "DistributedOptimizer grad value_and_grad reducescatter"),
        ("mxnet", "DistributedTrainer DistributedOptimizer reducescatter"),
    ],
)
def test_help_shows_the_name_of_a_reduction(module: str, names: str) -> None:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    source = f"""
import inspect
import horovod.{module} as hvd
for name in {names.split()}:
    signature = inspect.signature(getattr(hvd, name))
    assert "op: 'int' = Average" in str(signature) or "op: int = Average" in str(signature), signature
    assert signature.parameters["op"].default == hvd.Average
assert type(hvd.Average) is int
"""
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=LIMIT_S, env=environ)
    assert done.returncode == 0, done.stderr
