"""benchmarks/failover.py: what it refuses. That it measures is tested in tests/extended."""

from __future__ import annotations

import pytest

from benchmarks import failover


def test_no_gpu_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CUDA_LIBRARY", "")
    monkeypatch.setenv("HOROVOD_NCCL_LIBRARY", "")
    assert failover.main(["--transports", "gpu", "--gpu-libraries", "/nowhere/a,/nowhere/b"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("No tensors can be on a GPU here: there is no NVIDIA driver on this host: /nowhere/a")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--transports", "shm,pigeon"), "'pigeon' is no transport; there are shm, tcp, gpu."),
        (("--gpu-libraries", "one"), "'one' are not two files"),
    ],
)
def test_a_command_line_that_makes_no_sense(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        failover.main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
