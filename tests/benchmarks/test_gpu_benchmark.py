"""benchmarks/gpu.py: its figures and what it refuses. That it measures is tested in tests/extended."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import gpu, switch_point
from benchmarks.cases import Case, transformer350m_shapes
from benchmarks.measure import Figure, Row
from benchmarks.switch_point import Cell, Setting

WITH_GPU = torch.cuda.is_available()


def test_the_transformer_has_its_published_size() -> None:
    assert (len(transformer350m_shapes()), sum(map(math.prod, transformer350m_shapes()))) == (292, 354_823_168)


def test_figures() -> None:
    case = Case("resnet50", 2)
    figures = {
        "horovod": Figure([0.01, 0.02, 0.01], [0.0005, 0.0006, 0.0007]),
        "nccl": Figure([0.02, 0.02, 0.02], [0.001, 0.0012, 0.0014]),
        "group": Figure([0.01, 0.01, 0.02], [0.0004, 0.0004, 0.0004]),
    }
    row = Row(case, figures)
    found = gpu.host_figures(row)
    assert found["seconds"] == {"horovod": 0.0006, "nccl": 0.0012, "group": 0.0004}
    assert found["times_shorter_than"]["nccl"] == pytest.approx(2.0)
    assert found["beyond_group"] == pytest.approx(0.0002)
    shown = "2 resnet50 161 tensors, 97.49 MB 10 ms 10.22 600 us 20 ms 2.00 2.00 10 ms 1.00 400 us 200 us"
    assert " ".join(gpu.line(row).split()) == shown
    assert len(gpu.line(row)) == len(gpu.HEADER)
    del figures["group"]
    figures["horovod"].host_rounds = []
    row.refused["group"] = "group with 2 ranks did not start."
    assert gpu.host_figures(row)["beyond_group"] is None
    assert gpu.line(row).endswith("-\n    group is not reported: group with 2 ranks did not start.")


def cells(packs: set[tuple[int, int]]) -> list[Cell]:
    """Packing takes half as long for those (count, bytes), twice as long for the others."""
    return [
        Cell(count, size, 1.0 if (count, size) in packs else 4.0, 2.0)
        for count in (2, 8, 32)
        for size in (1024, 65536, 1 << 20)
    ]


@pytest.mark.parametrize(
    ("packs", "wins", "setting", "loss"),
    [
        (set(), (None, None, None), Setting(0, 1), 1.0),
        ({(8, 1024), (32, 1024), (8, 65536), (32, 65536)}, (8, 8, None), Setting(65536, 8), 1.0),
        ({(32, 1024), (8, 65536), (32, 65536)}, (32, 8, None), Setting(65536, 32), 2 ** (1 / 9)),
        ({(2, 1024), (8, 1024), (32, 1024), (8, 65536)}, (2, None, None), Setting(1024, 2), 2 ** (1 / 9)),
    ],
)
def test_where_packing_wins(
    packs: set[tuple[int, int]], wins: tuple[int | None, ...], setting: Setting, loss: float
) -> None:
    found = cells(packs)
    assert tuple(switch_point.wins_from(found).values()) == wins
    assert switch_point.best(found) == setting
    assert switch_point.loss(setting, found) == pytest.approx(loss)
    said = switch_point.sentence(setting, found)
    assert f"HOROVOD_GPU_PACK_THRESHOLD={setting.threshold_bytes}" in said
    assert said.startswith(f"packing wins from: 1 KB: {f'{wins[0]} tensors' if wins[0] else 'nowhere'}, 64 KB: ")


def test_the_defaults_are_those_of_the_settings() -> None:
    assert switch_point.default() == Setting(64 << 10, 8)
    assert switch_point.sentence(Setting(0, 1), []) == "Where packing wins is not known: nothing was measured."


def test_the_cells_fit_the_buffer() -> None:
    for quick in (False, True):
        found = switch_point.cases(2, quick)
        assert len({(case.tensors, case.bytes) for case in found}) == len(found) > 7
        assert all(4 * sum(case.elements) == case.tensors * case.bytes <= 64 << 20 for case in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--np", "0"), "'0' is no number of ranks; expected 1 or more."),
        (("--np", "1,two"), "'two' is no number of ranks"),
        (("--sizes", "5"), "'5' is no size"),
        (("--ops", "allreduce,gather"), "--ops: 'gather' is not known; there are allreduce, broadcast"),
        (("--models", "gpt"), "--models: 'gpt' is not known; there are resnet, transformer."),
    ],
)
def test_a_command_line_that_makes_no_sense(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        gpu.main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(WITH_GPU, reason="there is a CUDA device on this machine")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("There is nothing to measure: ")
    assert said.err.count("\n") == 1
