"""benchmarks/training.py trains the same model with every library, and says so only after it has compared them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import training
from benchmarks.measure import Figure, Row
from benchmarks.models import MODELS, TrainingCase, loss_of, make_batch, make_model
from benchmarks.trainer import Trainer
from benchmarks.world import WorldError


@pytest.mark.parametrize("model", MODELS)
def test_a_model_and_its_batches_are_the_same_everywhere(model: str) -> None:
    case = TrainingCase(model, 2, tiny=True)
    first, again = make_model(case), make_model(case)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert sum(parameter.numel() for parameter in first.parameters()) == case.result_elements
    inputs, labels = make_batch(case, 3, 4)
    assert torch.equal(inputs, make_batch(case, 3, 4)[0])
    assert not torch.equal(inputs, make_batch(case, 4, 4)[0])
    halves = [loss_of(first(inputs[part]), labels[part]) for part in (slice(2), slice(2, 4))]
    torch.testing.assert_close(sum(halves) / 2, loss_of(first(inputs), labels))  # no layer looks at the whole batch


class FakeWorld:
    """Says that it has trained, and by how much."""

    size = 2

    def __init__(self, after: float | None) -> None:
        self.after = after

    def ask(self, do: str, file: str, **arguments: Any) -> list[dict[str, Any]]:
        if self.after is None:
            raise WorldError("it has lost a rank")
        torch.save({"before": torch.zeros(3), "after": torch.tensor([0.0, 1.0, self.after])}, file)
        return [{}]


def test_wrong_parameters_are_refused(tmp_path: Path) -> None:
    def verify(**after: float | None) -> tuple[dict[str, float], dict[str, str]]:
        refused: dict[str, str] = {}
        worlds: Any = {name: FakeWorld(value) for name, value in {"alone": 0.5, **after}.items()}
        return training.verify(TrainingCase("mlp", 2, tiny=True), worlds, tmp_path, refused), refused

    distances, refused = verify(ddp=0.5, horovod=0.5 + 2**-14)
    assert distances == {"ddp": 0.0, "horovod": 2**-14, "each other": 2**-14}
    assert refused == {}
    distances, refused = verify(ddp=0.5, horovod=0.502)
    assert list(refused) == ["horovod"]
    assert "a parameter is off by 0.002 of the largest change" in refused["horovod"]
    assert list(verify(ddp=float("nan"), horovod=0.5)[1]) == ["ddp"]
    assert verify(ddp=None, horovod=0.5)[1] == {"ddp": "it has lost a rank"}


def test_a_step_that_leaves_no_number_is_refused() -> None:
    trainer = Trainer(0, 1, barrier=lambda: None)
    case = TrainingCase("mlp", 1, tiny=True)
    trainer.prepare("plain", **case.to_json())
    assert trainer.run("plain", blocks=2, calls=3)["checked"] == 2 * case.result_elements
    trainer._trainings["plain"].batches = [(torch.full((2, 784), float("inf")), torch.zeros(2, dtype=torch.int64))] * 4
    with pytest.raises(Exception, match="a parameter is not finite"):
        trainer.run("plain", blocks=1, calls=1)


def test_figures() -> None:
    case = TrainingCase("mlp", 2)
    rounds = {
        "alone": [0.1, 0.1, 0.1],
        "ddp": [0.4, 0.4, 0.4],
        "horovod": [0.2, 0.2, 0.4],
        "apart": [0.2, 0.1, 0.3],
    }
    row = Row(case, {name: Figure(seconds) for name, seconds in rounds.items()})
    rates = [training.samples_per_second(case, row, name) for name in ("alone", "ddp", "horovod")]
    assert rates == pytest.approx([640.0, 320.0, 640.0])
    assert row.ratio("ddp") == 2.0
    assert training.waiting(row, "horovod") == pytest.approx(0.25)
    assert training.waiting(row, "ddp") == 0.5
    assert training.line(case, row).split() == (
        ["mlp", "1.86", "M", "640.0", "320.0", "640.0", "2.00", "0.50", "1.00", "50.0%", "25.0%"]
    )
    assert row.ratio_interval("ddp") is None  # three rounds say nothing
    row.figures["ddp"].rounds = [*range(1, 101), *range(1, 101)]
    row.figures["horovod"].rounds = row.figures["apart"].rounds = [1.0] * 200
    assert row.ratio_interval("ddp") == (44, 57)  # 86 rounds below the first, 86 above the second
    assert "50.50 (44.00-57.00)" in training.line(case, row)
    del row.figures["ddp"]
    row.refused["ddp"] = "ddp with 2 ranks did not start."
    assert training.line(case, row).split()[4] == "-"
    assert training.line(case, row).endswith("\n    ddp is not reported: ddp with 2 ranks did not start.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--np", "1"), "1 is no number of ranks that train together"),
        (("--models", "gpt"), "'gpt' is none of the models; there are mlp, resnet, transformer."),
        (("--libraries", "mpi"), "'mpi' is none of the libraries"),
    ],
)
def test_a_command_line_that_makes_no_sense(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        training.main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
