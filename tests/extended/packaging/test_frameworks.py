"""The wheel beside frameworks of other times, in environments in which pip has nothing to complain of.

Two ranks train the digits with the oldest TensorFlow for this Python that is fit for the test (2.15: Keras 2, NumPy 1,
protobuf 4), with the last one before ours (2.19: protobuf 5), and with the oldest PyTorch, 2.1, which comes with CUDA's
libraries only, some 3 GB. HOROVOD_TEST_TORCH names another PyTorch.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import one_by_one
import pytest
from installing import ROOT, environment, pip, run

pytestmark = pytest.mark.timeout(900)
OLDEST_GRPC = "grpcio==1.66.2"  # the floor in pyproject.toml
WORLD = """
import grpc, google.protobuf
from google.protobuf.internal import api_implementation
import horovod.common.basics as hvd
from horovod.coordinator.core.agreement.operations import _TRAITS
from horovod.worker.runtime.coordinators import LEADER, leader_in

hvd.init()
assert [kind for kind, traits in _TRAITS.items() if traits.rooted] == [2]
assert leader_in(grpc.aio.Metadata((LEADER, "a:1"))) == "a:1"
print(hvd.rank(), hvd.size(), google.protobuf.__version__, grpc.__version__, api_implementation.Type())
"""


@pytest.mark.parametrize(
    ("packages", "implementation"),
    [
        (["protobuf==3.20.3", OLDEST_GRPC], "python"),  # without compiled code for this Python
        (["protobuf==4.25.8", OLDEST_GRPC], "upb"),
        (["protobuf>=7,<8", "grpcio"], "upb"),
        (["protobuf>=7,<8", "grpcio"], "python"),
    ],
)
def test_every_protobuf_and_grpcio(packages: list[str], implementation: str, wheel: Path, tmp_path: Path) -> None:
    """How protobuf is implemented is a user's choice: a well-known remedy is `..._IMPLEMENTATION=python`."""
    if sys.version_info >= (3, 13) and OLDEST_GRPC in packages:
        pytest.skip("that grpcio has no wheels for this Python")
    chosen = {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation}
    program = tmp_path / "world.py"
    program.write_text(WORLD)
    with environment(tmp_path / "venv", wheel, *packages) as programs:
        launcher = [programs / "horovodrun", "--start-timeout", "300", "-np", "2", programs / "python", program]
        said = run(*launcher, cwd=str(tmp_path), **chosen).splitlines()
    version = packages[0].strip("protbuf=>").partition(",")[0]
    assert sorted(line[: len("[0]<stdout>:0 2")] for line in said) == ["[0]<stdout>:0 2", "[1]<stdout>:1 2"], said
    for line in said:
        _, _, protobuf, grpc, found = line.split()
        assert protobuf.startswith(version)
        assert found == implementation
        assert OLDEST_GRPC not in packages or grpc == OLDEST_GRPC.removeprefix("grpcio==")


OLDEST_TORCH = "2.1.2"
TORCH = os.environ.get("HOROVOD_TEST_TORCH", OLDEST_TORCH)


@pytest.mark.parametrize(
    ("module", "packages", "examples", "versions"),
    [
        pytest.param(
            "horovod.tensorflow",
            ["tensorflow-cpu==2.15.*", OLDEST_GRPC],
            {"tensorflow2_digits.py": "--epochs 3", "keras_digits.py": "--epochs 3"},
            {"keras": "2.15.", "numpy": "1.26.", "protobuf": "4."},
            id="tensorflow-2.15",
            marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="TensorFlow 2.15 is not for this Python"),
        ),
        pytest.param(
            "horovod.tensorflow",
            ["tensorflow-cpu==2.19.*"],
            {"tensorflow2_digits.py": "--epochs 3", "keras_digits.py": "--epochs 3"},
            {"keras": "3.", "protobuf": "5."},
            id="tensorflow-2.19",
            marks=pytest.mark.skipif(sys.version_info >= (3, 13), reason="TensorFlow 2.19 is not for this Python"),
        ),
        pytest.param(
            "horovod.torch",
            [f"torch=={TORCH}", "numpy<2"],
            {"torch_digits.py": "--epochs 5", "torch_uneven_data.py": ""},
            {"torch": TORCH},
            id="torch",
            marks=pytest.mark.skipif(
                TORCH == OLDEST_TORCH and sys.version_info >= (3, 12), reason="PyTorch 2.1 is not for this Python"
            ),
        ),
    ],
)
def test_digits_beside_a_framework(
    module: str, packages: list[str], examples: dict[str, str], versions: dict[str, str], wheel: Path, tmp_path: Path
) -> None:
    """examples: with their options."""
    with environment(tmp_path / "venv", wheel, "scikit-learn", "tqdm", *packages) as programs:
        listed = run(*pip(programs), "list", "--format=freeze")
        there = dict(line.split("==") for line in listed.splitlines() if "==" in line)
        assert {name: there[name] for name in versions if not there[name].startswith(versions[name])} == {}
        path = f"{programs}:{os.environ['PATH']}"
        played = [f"{ROOT / 'examples' / name} {options}".strip() for name, options in examples.items()]
        launcher = [programs / "horovodrun", "--start-timeout", "300", "-np", "2"]
        command = one_by_one.command(module, 2, played, str(programs / "python"))
        said = run(*launcher, *command, cwd=str(tmp_path), PATH=path)
        printed = one_by_one.outputs("".join(re.findall(r"^\[0\]<stdout>:(.*\n)", said, re.MULTILINE)))
        assert len(printed) == len(examples), said
        for one in printed:
            accuracy = re.findall(r"accuracy:? (0\.\d+|1\.0+)", one)
            assert float(accuracy[-1]) > 0.8, said
