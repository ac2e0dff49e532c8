"""The table that other programs parse."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
from native_builds import gpu_libraries

import horovod
from horovod import _core
from horovod.base.frameworks import FRAMEWORKS
from horovod.launch.command_line import check_build as module

SHAPE = """\
Horovod v{version}:

Available Frameworks:
    [{TensorFlow}] TensorFlow
    [{PyTorch}] PyTorch
    [{MXNet}] MXNet
LATER
Available Controllers:
    [{MPI}] MPI
    [{Native}] Gloo
    [{Native}] Coordinator

Available Tensor Operations:
    [{NCCL}] NCCL
    [{DDL}] DDL
    [{CCL}] CCL
    [{MPI}] MPI
    [{Gloo}] Gloo
    [{Native}] Native

Available Launchers:
    [{Ray}] Ray
    [{Spark}] Spark
"""
OF_EARLIER_VERSIONS = ["TensorFlow", "PyTorch", "MXNet"]
LATER = [one.name for one in FRAMEWORKS if one.has_build_line and one.name not in OF_EARLIER_VERSIONS]
SHAPE = SHAPE.replace("LATER", "".join(f"    [{{{name}}}] {name}\n" for name in LATER))
Installed = Callable[..., CompletedProcess[str]]
NAMES = [
    *OF_EARLIER_VERSIONS,
    *LATER,
    "MPI",
    "Gloo",
    "NCCL",
    "DDL",
    "CCL",
    "Native",
    "Ray",
    "Spark",
]


@pytest.mark.parametrize("present", [set(), {"PyTorch", "Native"}, {"TensorFlow", "MPI", "Gloo", "NCCL"}, set(NAMES)])
def test_shape(monkeypatch: pytest.MonkeyPatch, present: set[str]) -> None:
    monkeypatch.setattr(module, "_has", present.__contains__)
    marks = {name: "X" if name in present else " " for name in NAMES}
    assert module.check_build() == SHAPE.format(version=horovod.__version__, **marks)


def test_an_answer_is_what_happens_in_another_process() -> None:
    assert module._runs("pass")
    assert not module._runs("import no_such_module_anywhere")
    assert not module._runs("import os; os.abort()")


@pytest.mark.timeout(400)  # it imports all frameworks that there are
def test_the_command_tells_the_truth(installed: Installed) -> None:
    """Of what is installed, and not of files of the same names where it is called."""
    done = installed("--check-build")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    torch = importlib.util.find_spec("torch") is not None
    assert ("    [X] PyTorch" in lines) == torch
    assert "    [X] Native" in lines
    assert "    [ ] MPI" in lines
    gloo = "    [ ] Gloo" if _core.gloo_obstacle() else "    [X] Gloo"
    operations = lines.index("Available Tensor Operations:")
    assert gloo in lines[operations:]
    assert "    [X] Gloo" in lines[:operations], "a controller: jobs run without MPI"
    assert ("    [X] TensorFlow" in lines) == (importlib.util.find_spec("tensorflow") is not None)
    lightning = any(importlib.util.find_spec(name) for name in ("lightning", "pytorch_lightning"))
    assert ("    [X] Lightning" in lines) == lightning
    assert ("    [X] Ray" in lines) == (importlib.util.find_spec("ray") is not None)
    assert ("    [X] Spark" in lines) == (importlib.util.find_spec("pyspark") is not None)


@pytest.mark.parametrize(
    ("cuda", "nccl", "environ", "mark"),
    [
        (True, True, {}, "X"),
        (True, False, {}, " "),
        (False, True, {}, " "),
        (True, True, {"STANDIN_NCCL_VERSION": "21304"}, " "),
        (True, True, {"STANDIN_CUDA_VERSION": "11010"}, " "),
    ],
    ids=["both", "no-nccl", "no-driver", "old-nccl", "old-driver"],
)
def test_nccl_is_there_where_gpu_tensors_could_use_it(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, nccl: bool, environ: dict[str, str], mark: str
) -> None:
    there = [str(file) for file in gpu_libraries()]
    files = {
        "HOROVOD_CUDA_LIBRARY": there[0] if cuda else "/nowhere/libcuda.so.1",
        "HOROVOD_NCCL_LIBRARY": there[1] if nccl else "/nowhere/libnccl.so.2",
    }
    for name, value in {**files, **environ}.items():
        monkeypatch.setenv(name, value)
    assert module._has("NCCL") == (mark == "X")
