"""Code and files of Keras 2 that meet Keras 3: the hint behind the error, in load_model, and optimizer.lr."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from horovod.base.errors import LaunchCode, TrainingCode, code_of

keras = pytest.importorskip("keras")
pytest.importorskip("tensorflow")

SCRIPT = """
import keras
import horovod.keras as hvd
hvd.init()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", {argument})
raise ValueError("a mistake of its own")
"""


@pytest.mark.parametrize("argument", ["experimental_run_tf_function=False", ""])
def test_the_error_that_ends_a_script_has_a_hint_behind_it(argument: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(argument=argument))
    command = [sys.executable, "-m", "horovod.launch", "-np", "2", "--start-timeout", "200", sys.executable]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert (f"[{LaunchCode.OLDER_SCRIPT}]" in done.stderr) == bool(argument), done.stderr
    assert ("horovodrun --check" in done.stderr) == bool(argument)


@pytest.mark.parametrize(
    "fails",
    [
        lambda: keras.optimizers.Adam(lr=0.1),
        lambda: keras.optimizers.SGD(0.1).lr,
        lambda: keras.Sequential().fit_generator([]),
        lambda: keras.Sequential([keras.Input((2,))]).save_weights("weights.h5"),
        lambda: keras.callbacks.ModelCheckpoint("checkpoint"),
        lambda: _compiled().fit([[0.0]], workers=2),
        lambda: _tensorflow().keras.optimizers.legacy.SGD(0.1),
        lambda: _tensorflow().keras.backend.set_session(None),
    ],
)
def test_errors_of_keras_3_that_have_a_hint(fails: Any) -> None:
    from horovod._keras.older_code import hint

    with pytest.raises((TypeError, ValueError, AttributeError, ImportError)) as caught:
        fails()
    assert code_of(hint(caught.value)) == LaunchCode.OLDER_SCRIPT
    assert hint(ValueError("a mistake of its own")) == ""


def _compiled() -> Any:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def _tensorflow() -> Any:
    import tensorflow as tf

    return tf


@pytest.mark.filterwarnings("ignore")
def test_files_of_keras_2_that_keras_3_does_not_load(tmp_path: Path) -> None:
    import horovod.keras as hvd

    model = _compiled()
    model.save(tmp_path / "model.h5")
    model.export(tmp_path / "saved", verbose=False)
    for path in (tmp_path / "model.h5", tmp_path / "saved"):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            hvd.load_model(str(path))
        assert code_of(str(caught.value)) == TrainingCode.OLDER_MODEL_FILE
    hvd.load_model(str(tmp_path / "model.h5"), custom_objects={"mse": keras.losses.MeanSquaredError()})
    with pytest.raises(ValueError, match="not found"):
        hvd.load_model(str(tmp_path / "nothing.keras"))


def test_a_distributed_optimizer_knows_lr() -> None:
    """Assigning to `lr` of an optimizer of Keras 3 would change nothing, without a word."""
    import horovod.keras as hvd

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    assert float(optimizer.lr) == pytest.approx(0.5)
    optimizer.lr = 0.25
    assert float(optimizer.learning_rate) == pytest.approx(0.25)
