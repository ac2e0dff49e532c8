"""Every example learns with two ranks under horovodrun, and runs as a plain script."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
HOROVODRUN = [sys.executable, "-m", "horovod.launch"]
NUMBER = r"(\d+\.?\d*)"


def run(command: list[str]) -> str:
    """Its stdout, without what says which rank it is from."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"^\[0\]<stdout>:", "", done.stdout, flags=re.MULTILINE)


def learned(expected: str, name: str, *options: str) -> list[float]:
    """Runs an example with two ranks; the numbers in what rank 0, and nobody else, has printed."""
    said = run([*HOROVODRUN, "-np", "2", sys.executable, str(EXAMPLES / name), *options])
    found = re.fullmatch(expected.replace("NUMBER", NUMBER) + "\n", said)
    assert found, said
    return [float(number) for number in found.groups()]


def test_language_model() -> None:
    expected = "test perplexity: NUMBER before, NUMBER after training on NUMBER bytes"
    before, after, size = learned(expected, "torch_language_model.py", "--steps", "100")
    assert 200 < before < 400
    assert after < 20
    assert size > 50_000


def test_accumulation_and_mixed_precision() -> None:
    expected = "test accuracy: NUMBER after NUMBER steps, NUMBER of them with a clipped gradient"
    accuracy, steps, clipped = learned(expected, "torch_accumulation_amp.py")
    assert accuracy > 0.95
    assert steps == 15 * (1347 // 2 // 8) // 4
    assert 0 < clipped < steps


@pytest.mark.parametrize("options", [[], ["--sparse-as-dense"]], ids=["sparse", "as-dense"])
def test_sparse_embeddings(options: list[str]) -> None:
    expected = "neighbours found: NUMBER; the last step touched NUMBER of NUMBER words"
    found, touched, words = learned(expected, "torch_sparse_embeddings.py", "--steps", "300", *options)
    assert found > 0.62
    assert touched < words / 2


def test_process_sets() -> None:
    digit, odd = learned("test accuracy: digit NUMBER, odd NUMBER", "torch_process_sets.py")
    assert min(digit, odd) > 0.93


def test_uneven_data() -> None:
    expected = "test accuracy: NUMBER; batches of each process in an epoch: NUMBER, NUMBER"
    accuracy, fewer, more = learned(expected, "torch_uneven_data.py")
    assert accuracy > 0.95
    assert (fewer, more) == (15, 29)


def test_powersgd() -> None:
    expected = "a step sends NUMBER numbers in place of NUMBER\ntest accuracy: NUMBER"
    sent, plain, accuracy = learned(expected, "torch_powersgd.py")
    assert sent < plain / 20
    assert accuracy > 0.95


def test_resnet() -> None:
    accuracy, images = learned("test accuracy: NUMBER on NUMBER images", "torch_resnet.py")
    assert accuracy > 0.9
    assert images == 450


ALONE = """
import runpy, sys
import horovod.torch as hvd
for command in sys.argv[1:]:
    sys.argv = command.split()
    sys.path.insert(0, sys.argv[0].rpartition("/")[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert hvd.size() == 1
    hvd.shutdown()
"""


def test_each_runs_alone() -> None:
    commands = {
        "torch_language_model.py --steps 2": "test perplexity",
        "torch_accumulation_amp.py --epochs 1": "test accuracy",
        "torch_sparse_embeddings.py --steps 2": "neighbours found",
        "torch_process_sets.py --epochs 1": "test accuracy: digit",
        "torch_uneven_data.py --epochs 1": "test accuracy",
        "torch_powersgd.py --epochs 1": "test accuracy",
        "torch_digits.py --epochs 1": "test accuracy",
        "torch_resnet.py --epochs 1": "test accuracy",
    }
    said = run([sys.executable, "-c", ALONE, *(f"{EXAMPLES}/{command}" for command in commands)]).splitlines()
    assert [line.startswith(start) for line, start in zip(said, commands.values(), strict=True)] == [True] * len(
        commands
    ), said


needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed"
)


@needs_tensorflow
@pytest.mark.parametrize(
    ("name", "options", "backend"),
    [
        ("tensorflow2_digits.py", [], "tensorflow"),
        ("keras_digits.py", ["--epochs", "8"], "tensorflow"),
        ("keras_digits.py", ["--epochs", "8"], "torch"),
    ],
)
def test_tensorflow_and_keras_digits(
    name: str, options: list[str], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes are as accurate as one: about 0.98, of which 0.95 is far from what a mistake would leave."""
    monkeypatch.setenv("KERAS_BACKEND", backend)
    for command in (
        [*HOROVODRUN, "-np", "2", sys.executable, str(EXAMPLES / name), *options],
        [sys.executable, str(EXAMPLES / name), *options],
    )[: 2 if backend == "tensorflow" else 1]:
        said = run(command)
        found = re.search(rf"^accuracy {NUMBER} .*with (\d) processes$", said, re.MULTILINE)
        assert found, said
        assert float(found.group(1)) > 0.95, said


@needs_tensorflow
def test_text_with_indexed_slices() -> None:
    accuracy, _, _ = learned("accuracy NUMBER, loss NUMBER with NUMBER processes", "tensorflow2_text.py")
    assert accuracy > 0.93


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning_digits() -> None:
    accuracy, ranks = learned("test accuracy: NUMBER with NUMBER processes", "lightning_digits.py")
    assert accuracy > 0.93
    assert ranks == 2


@pytest.mark.skipif(
    importlib.util.find_spec("jax") is None or importlib.util.find_spec("optax") is None,
    reason="jax or optax is not installed",
)
def test_jax_digits() -> None:
    """Two processes are as accurate as one."""
    script = [sys.executable, str(EXAMPLES / "jax_digits.py")]
    for command in ([*HOROVODRUN, "-np", "2", *script], script):
        said = run(command)
        found = re.search(rf"^accuracy {NUMBER} with (\d) processes$", said, re.MULTILINE)
        assert found, said
        assert float(found.group(1)) > 0.95, said
