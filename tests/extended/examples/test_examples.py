"""Every example learns with two ranks under horovodrun, and runs as a plain script."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import one_by_one
import pytest

pytestmark = pytest.mark.timeout(400)

EXAMPLES = Path(__file__).parents[3] / "examples"
# Of two ranks that import a framework on a busy machine, one may be half a minute later.
HOROVODRUN = [sys.executable, "-m", "horovod.launch", "--start-timeout", "200"]
NUMBER = r"(\d+\.?\d*)"
PILLOW = importlib.util.find_spec("PIL") is not None
FOUND = "neighbours found: NUMBER; the last step touched NUMBER of NUMBER words"


def run(command: list[str]) -> str:
    """Its stdout, without what says which rank it is from."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"^\[0\]<stdout>:", "", done.stdout, flags=re.MULTILINE)


def numbers(expected: str, said: str) -> list[float]:
    """Those that the example has printed, and nothing else."""
    found = re.fullmatch(expected.replace("NUMBER", NUMBER) + "\n", said)
    assert found, said
    return [float(number) for number in found.groups()]


def play(module: str, ranks: int, *examples: str) -> list[str]:
    """What each has printed, with so many ranks under horovodrun, or as a plain script; only rank 0 prints."""
    launcher = [*HOROVODRUN, "-np", str(ranks)] if ranks > 1 else []
    said = run([*launcher, *one_by_one.command(module, ranks, [f"{EXAMPLES}/{example}" for example in examples])])
    found = one_by_one.outputs(said)
    assert len(found) == len(examples), said
    return found


def test_pytorch_with_two_ranks() -> None:
    expected = {
        "torch_distributed_digits.py": "test accuracy: NUMBER with NUMBER processes",
        "torch_distributed_digits.py --sharded": "test accuracy: NUMBER with NUMBER processes",
        "torch_language_model.py --steps 100": "test perplexity: NUMBER before, NUMBER after training on NUMBER bytes",
        "torch_accumulation_amp.py": "test accuracy: NUMBER after NUMBER steps, NUMBER of them with a clipped gradient",
        "torch_sparse_embeddings.py --steps 300": FOUND,
        "torch_sparse_embeddings.py --steps 300 --sparse-as-dense": FOUND,
        "torch_process_sets.py": "test accuracy: digit NUMBER, odd NUMBER",
        "torch_uneven_data.py": "test accuracy: NUMBER; batches of each process in an epoch: NUMBER, NUMBER",
        "torch_powersgd.py": "a step sends NUMBER numbers in place of NUMBER\ntest accuracy: NUMBER",
        "torch_resnet.py": "test accuracy: NUMBER on NUMBER images",
        "torch_image_folder.py": "test accuracy: NUMBER on NUMBER images of 3 classes",
        "torch_finetune_transformer.py": "test accuracy: NUMBER before, NUMBER after fine-tuning",
        "torch_gan.py --steps 800": "NUMBER of the points are near a centre; centres found: NUMBER of 8",
    }
    if not PILLOW:
        del expected["torch_image_folder.py"]
    said = play("horovod.torch", 2, *expected)
    found_by = dict(zip(expected, map(numbers, expected.values(), said), strict=True))
    replicated, sharded, language, accumulation, sparse, dense, sets, uneven, powersgd, resnet, *others = (
        found_by.values()
    )

    before, after, size = language
    assert 200 < before < 400
    assert after < 20
    assert size > 50_000

    accuracy, steps, clipped = accumulation
    assert accuracy > 0.95
    assert steps == 15 * (1347 // 2 // 8) // 4
    assert 0 < clipped < steps

    for found, touched, words in (sparse, dense):
        assert found > 0.62
        assert touched < words / 2

    digit, odd = sets
    assert min(digit, odd) > 0.93

    accuracy, *batches = uneven
    assert accuracy > 0.95
    assert batches == [15, 29]

    for accuracy, ranks in (replicated, sharded):
        assert accuracy > 0.95
        assert ranks == 2

    sent, plain, accuracy = powersgd
    assert sent < plain / 20
    assert accuracy > 0.95

    accuracy, images = resnet
    assert accuracy > 0.9
    assert images == 450

    fine_tuned, gan = others[-2:]
    before, after = fine_tuned
    assert before < 0.6
    assert after > 0.8

    near, centres = gan
    assert near > 0.8
    assert centres >= 7

    if PILLOW:
        accuracy, images = others[0]
        assert accuracy > 0.9
        assert images == 90


def test_pytorch_alone(tmp_path: Path) -> None:
    fine_tuned = f"torch_finetune_transformer.py --pretrained {tmp_path}/weights.pt --pretrain-steps 1 --epochs 0"
    commands = {
        "torch_language_model.py --steps 2": "test perplexity",
        "torch_accumulation_amp.py --epochs 1": "test accuracy",
        "torch_sparse_embeddings.py --steps 2": "neighbours found",
        "torch_process_sets.py --epochs 1": "test accuracy: digit",
        "torch_uneven_data.py --epochs 1": "test accuracy",
        "torch_powersgd.py --epochs 1": "test accuracy",
        "torch_digits.py --epochs 1": "test accuracy",
        "torch_distributed_digits.py --epochs 1": "test accuracy",
        "torch_distributed_digits.py --epochs 1 --sharded": "test accuracy",
        "torch_resnet.py --epochs 1": "test accuracy",
        "torch_imagenet_resume.py --epochs 1": "epoch 1: test loss",
        fine_tuned: "test accuracy",
        f"{fine_tuned} --lr 0": "test accuracy",  # from the file that the first has written
        "torch_gan.py --steps 2": "0.",
        "torch_elastic_shards.py --epochs 1": "epoch 1: uses of a sample [0, 1344], processes 1\ntest accuracy",
        **({"torch_image_folder.py --epochs 1": "test accuracy"} if PILLOW else {}),
    }
    said = play("horovod.torch", 1, *commands)
    assert [output.startswith(start) for output, start in zip(said, commands.values(), strict=True)] == [True] * len(
        commands
    ), said
    answers = dict(zip(commands, said, strict=True))
    assert answers[fine_tuned] == answers[f"{fine_tuned} --lr 0"]


needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed"
)


def is_as_accurate_as_one(said: str, ranks: int) -> None:
    """Any number of processes is: about 0.98, of which 0.95 is far from what a mistake would leave."""
    found = re.search(rf"^accuracy {NUMBER} .*with {ranks} process", said, re.MULTILINE)
    assert found, said
    assert float(found.group(1)) > 0.95, said


DIGITS = ("tensorflow2_digits.py", "keras_digits.py --epochs 8")
FILES = ("tensorflow2_tfrecords.py", "keras_files.py --epochs 14")


@needs_tensorflow
def test_tensorflow_with_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    *digits, text = play("horovod.tensorflow", 2, *DIGITS, *FILES, "tensorflow2_text.py")
    for said in digits:
        is_as_accurate_as_one(said, 2)
    accuracy, _, ranks = numbers("accuracy NUMBER, loss NUMBER with NUMBER processes", text)
    assert accuracy > 0.93
    assert ranks == 2


@needs_tensorflow
def test_tensorflow_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    for said in play("horovod.tensorflow", 1, *DIGITS):
        is_as_accurate_as_one(said, 1)


@needs_tensorflow
def test_keras_on_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    script = [sys.executable, str(EXAMPLES / "keras_digits.py"), "--epochs", "8"]
    is_as_accurate_as_one(run([*HOROVODRUN, "-np", "2", *script]), 2)


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning_digits() -> None:
    said = run([*HOROVODRUN, "-np", "2", sys.executable, str(EXAMPLES / "lightning_digits.py")])
    accuracy, ranks = numbers("test accuracy: NUMBER with NUMBER processes", said)
    assert accuracy > 0.93
    assert ranks == 2


@pytest.mark.skipif(
    importlib.util.find_spec("jax") is None or importlib.util.find_spec("optax") is None,
    reason="jax or optax is not installed",
)
def test_jax_digits() -> None:
    """Two processes are as accurate as one."""
    script = [sys.executable, str(EXAMPLES / "jax_digits.py")]
    is_as_accurate_as_one(run([*HOROVODRUN, "-np", "2", *script]), 2)
    is_as_accurate_as_one(run(script), 1)
