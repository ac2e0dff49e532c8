"""--pin-gpus: each process sees one GPU; which ones there are is said by CUDA_VISIBLE_DEVICES or by the driver.

The driver is that of tests/native/gpu, whose number of GPUs a variable decides.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
from error_codes import ends_with
from native_builds import gpu_libraries

from horovod.base.errors import LaunchCode
from horovod.worker.agent.cores_and_gpus import pinned, visible_gpus
from horovod.worker.agent.supervisor import Slot

Run = Callable[..., CompletedProcess[str]]
Program = Callable[[str], list[str]]
SHOW = "print(os.environ.get('CUDA_VISIBLE_DEVICES', 'unset'))"
NOWHERE = {"HOROVOD_CUDA_LIBRARY": "/nowhere/libcuda.so.1"}


@pytest.fixture(autouse=True)
def nobody_chose_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture(scope="module")
def driver() -> dict[str, str]:
    return {"HOROVOD_CUDA_LIBRARY": str(gpu_libraries()[0])}


def seen(done: CompletedProcess[str]) -> list[str]:
    """What each rank printed, in rank order."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition(":")[2] for line in sorted(done.stdout.splitlines())]


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [
        ("0,1,2", ["0", "1", "2"]),
        (" 3 , 1,0,2", ["3", "1", "0"]),
        ("GPU-8932f937,GPU-d4b2f0a1,GPU-0f", ["GPU-8932f937", "GPU-d4b2f0a1", "GPU-0f"]),
        ("MIG-41b3,MIG-9ab0,MIG-77aa", ["MIG-41b3", "MIG-9ab0", "MIG-77aa"]),
    ],
)
def test_what_the_launcher_may_see_is_dealt_out(
    horovodrun: Run, program: Program, visible: str, wanted: list[str]
) -> None:
    """The driver is not asked: there is none."""
    done = horovodrun("-np", "3", "--pin-gpus", *program(SHOW), environ={"CUDA_VISIBLE_DEVICES": visible, **NOWHERE})
    assert seen(done) == wanted


def test_else_the_driver_counts(horovodrun: Run, program: Program, driver: dict[str, str]) -> None:
    environ = {**driver, "STANDIN_CUDA_DEVICES": "4", "HOROVOD_PIN_GPUS": "1"}
    assert seen(horovodrun("-np", "4", *program(SHOW), environ=environ)) == ["0", "1", "2", "3"]
    assert seen(horovodrun("-np", "1", "--no-pin-gpus", *program(SHOW), environ=environ)) == ["unset"]


def test_two_names_of_this_machine_share_its_gpus(horovodrun: Run, program: Program, driver: dict[str, str]) -> None:
    done = horovodrun("-np", "3", "-H", "127.0.0.1:2,127.0.0.2:1", "--pin-gpus", *program(SHOW), environ=driver)
    assert seen(done) == ["0", "1", "2"]


def test_pinning_is_asked_for(horovodrun: Run, program: Program) -> None:
    """Without it a script chooses by its local rank, and what its user set arrives as it is, also when it is empty."""
    for given in ("0,1", ""):
        done = horovodrun("-np", "2", *program(SHOW), environ={"CUDA_VISIBLE_DEVICES": given, **NOWHERE})
        assert seen(done) == [given, given]


@pytest.mark.parametrize(
    ("environ", "facts"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,GPU-d4"}, ["2 (0, GPU-d4)", "CUDA_VISIBLE_DEVICES is '0,GPU-d4'"]),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2,3"}, ["1 (1)", "CUDA_VISIBLE_DEVICES is '1,-1,2,3'"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, [" none:", "CUDA_VISIBLE_DEVICES is ''"]),
        ({"STANDIN_CUDA_DEVICES": "2"}, ["2 (0, 1)", "driver counts 2"]),
        ({"STANDIN_CUDA_DEVICES": "0"}, [" none:", "no GPU"]),
        ({"STANDIN_CUDA_FAIL": "cuInit:999"}, [" none:", "cuInit", "999"]),
        (NOWHERE, [" none:", "no NVIDIA driver", "/nowhere/libcuda.so.1"]),
    ],
)
def test_too_few_gpus_start_nothing(
    horovodrun: Run, program: Program, driver: dict[str, str], environ: dict[str, str], facts: list[str]
) -> None:
    done = horovodrun("-np", "3", "--pin-gpus", *program(SHOW), environ={**driver, **environ})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    facts = ["3 processes", "HOROVOD_PIN_GPUS", "--pin-gpus", *facts]
    assert re.search(ends_with(LaunchCode.TOO_FEW_GPUS, *facts), done.stderr)


def test_a_driver_that_breaks_is_told() -> None:
    library = {**os.environ, "HOROVOD_CUDA_LIBRARY": "libc.so.6"}  # which has none of its functions
    devices, where = visible_gpus(library)
    assert devices == []
    assert "undefined symbol: cuInit" in where
    assert pinned([]) == []


def test_slots_keep_everything_else() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "5,6", "A": "b"}
    first, second = pinned([Slot(4, ["x"], environ, "/"), Slot(5, ["y"], environ)])
    assert (first.rank, first.command, first.directory) == (4, ["x"], "/")
    assert first.environ == {"CUDA_VISIBLE_DEVICES": "5", "A": "b"}
    assert second.environ["CUDA_VISIBLE_DEVICES"] == "6"
