"""`horovodrun --check`: each rule finds what it is for, and nothing in scripts of this version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from older_scripts import OLDER

from horovod.base.errors import LaunchCode, code_of
from horovod.launch.check.files import check
from horovod.launch.check.rules import RULES, rules_of, setting_faults
from horovod.launch.check.script import Script
from horovod.launch.check.shell import faults_in_shell

ROOT = Path(__file__).parents[2]


def lines_of(code: str) -> list[int]:
    return [line for line, _, _ in rules_of(Script(code))]


def test_each_rule_has_code_that_it_finds() -> None:
    assert [rule.name for rule in RULES] == list(OLDER)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_finds_its_line_alone(rule: object) -> None:
    code = OLDER[rule.name].code  # type: ignore[attr-defined]
    marked = [number for number, line in enumerate(code.splitlines(), 1) if line.endswith("#!")]
    assert [line for line, sentence, _ in rules_of(Script(code))] == marked
    assert {sentence for _, sentence, _ in rules_of(Script(code))} == {rule.sentence}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.optim.Adam([], lr=0.1)",
        "from torch.optim import Adam\nimport keras\nAdam([], lr=0.1)",
        "import os\nos.environ['TF_USE_LEGACY_KERAS'] = '1'\nimport tensorflow as tf\ntf.keras.optimizers.Adam(lr=0.1)",
        "import tensorflow.compat.v1 as tf\ntf.Session(config=tf.ConfigProto())",
        "import horovod.torch as hvd\nhvd.init(comm=[0, 1])",
        "import horovod.torch as hvd\nfrom mpi4py import MPI\nhvd.init()\nhvd.ProcessSet([MPI.COMM_WORLD.rank])",
        "import horovod\nhorovod.run(print, use_mpi=False, mpi_args=None)",
        "import torch.utils.data as d, horovod.torch as hvd\nd.DistributedSampler([], hvd.size(), hvd.rank())",
        "import torch.distributed as d, horovod.torch as hvd\nd.init_process_group('gloo', rank=0)\nd.get_rank()",
        "import os\nimport horovod.torch as hvd\nos.environ['HOROVOD_TIMELINE'] = 'DYNAMIC'\nos.environ['RANK'] = '0'",
        "import horovod.torch as hvd\nif __name__ == '__main__':\n    hvd.init(), f(multiprocessing_context='spawn')",
        "from horovod.runner.launch import run_commandline\nfrom horovod.torch.elastic.state import TorchState",
        "from . import horovod\nfrom .run import horovod",
    ],
)
def test_code_that_works_is_told_nothing(code: str) -> None:
    assert lines_of(code) == []


def test_keras_2_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    assert lines_of(OLDER["lr"].code) == []


@pytest.mark.parametrize(
    "line",
    [
        "import horovod.run",
        "from horovod.run import run_commandline",
        "from horovod.torch.mpi_lib_v2 import horovod_torch_join",
        "os.environ['HOROVOD_AUTOTUNE'] = '1'",
        "os.environ.setdefault('HOROVOD_CYCLE_TIME', '5')",
        "subprocess.run([], env={'HOROVOD_FUSION_THRESHOLD': 'x'})",
        "os.environ['HOROVOD_FUSION_TRESHOLD'] = '0'",
    ],
)
def test_modules_and_settings(line: str) -> None:
    assert lines_of("import os, subprocess\n" + line) == [2]


def test_a_setting_whose_value_is_not_known_is_not_refused() -> None:
    assert list(setting_faults("HOROVOD_FUSION_THRESHOLD", None)) == []
    assert len(list(setting_faults("HOROVOD_FUSION_THRESHOLD", "much"))) == 1


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("horovodrun -np 2 --mpi python train.py", "--mpi"),
        ("/usr/bin/horovodrun -np $N \\\n  --cycle-time-ms 5 python train.py", "--cycle-time-ms"),
        ("horovodrun -np 2 --no-such-option python train.py > log", "--no-such-option"),
        ("export HOROVOD_AUTOTUNE=1", "HOROVOD_AUTOTUNE"),
        ("docker run -e HOROVOD_CYCLE_TIME=x image", "HOROVOD_CYCLE_TIME"),
    ],
)
def test_a_line_of_a_shell_script(line: str, word: str) -> None:
    [(number, sentence, _)] = faults_in_shell(f"set -e\n{line}\n")
    assert number == 2
    assert word in sentence


@pytest.mark.parametrize(
    "line",
    [
        "horovodrun -np $N -H $HOSTS python train.py --mpi 2>&1 | tee log --autotune",
        "horovodrun ps --coordinator a:1",
        "echo 'never closed",
        "export HOROVOD_FUSION_THRESHOLD=$THRESHOLD",
        "mpirun -np 2 python train.py",
    ],
)
def test_a_line_that_works_is_told_nothing(line: str) -> None:
    assert list(faults_in_shell(line)) == []


def test_files_folders_and_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/old.py").write_text("import horovod.run\n")
    (tmp_path / "new.py").write_text("import horovod\n")
    assert check([str(tmp_path)]) == 0
    assert capsys.readouterr() == ("", "")

    (tmp_path / "start.sh").write_text("horovodrun -np 2 --mpi python train.py\n")
    (tmp_path / "old.py").write_text("\nimport horovod.run\n")
    assert check([str(tmp_path)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path}/old.py:2: ")
    assert second.startswith(f"{tmp_path}/start.sh:1: ")
    assert code_of(first) == LaunchCode.OLDER_SCRIPT
    assert code_of(second) == LaunchCode.OLDER_SCRIPT

    (tmp_path / "python2.py").write_text("print 'x'\n")
    assert check([str(tmp_path)]) == 2
    assert check([str(tmp_path / "missing.py")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"{tmp_path}/python2.py:1: ")
    assert code_of(said[0]) == LaunchCode.SCRIPT_UNREADABLE
    assert code_of(said[1]) == LaunchCode.SCRIPT_UNREADABLE


def test_our_own_examples_are_told_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert check([str(ROOT / "examples"), str(ROOT / "clients/horovod")]) == 0, capsys.readouterr().out


def test_the_command_runs_nothing_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)\nimport horovod.run\n")
    command = [sys.executable, "-m", "horovod.launch", "--check"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(f"{script}:2: ")
    without = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert without.returncode == 2
    assert code_of(without.stderr.strip()) == LaunchCode.WRONG_COMMAND_LINE
