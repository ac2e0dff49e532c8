"""The tutorial's script learns, on one process and on two, and says so once."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest
import tiers

from horovod.coordinator.server import EmbeddedCoordinator

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "torch_digits.py"


def _run(ranks: int) -> list[subprocess.CompletedProcess[str]]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    with EmbeddedCoordinator() as coordinator:
        world = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": str(ranks)} if ranks > 1 else {}
        processes = [
            subprocess.Popen(
                [sys.executable, str(EXAMPLE)],
                env={**base, **world},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=380) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.mark.longer
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", tiers.pick([2], [1]))
def test_digits(ranks: int) -> None:
    finished = _run(ranks)
    assert [process.returncode for process in finished] == [0] * ranks, finished
    spoken = [process for process in finished if process.stdout or process.stderr]
    assert len(spoken) == 1, "only rank 0 speaks"
    assert "images_per_s" in spoken[0].stderr
    found = re.fullmatch(r"test accuracy: (\d\.\d+)\n", spoken[0].stdout)
    assert found, spoken[0].stdout
    assert float(found[1]) >= 0.97
