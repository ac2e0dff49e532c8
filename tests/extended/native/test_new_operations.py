"""The steps of CONTRIBUTING.md for a new type of operation and a new reduction, taken in a copy of the tree: what is
tested is the page. The copy is built without optimization and runs the tests of all operations, the new ones among
them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from error_codes import ends_with
from native_builds import run, tool
from page_steps import Tree, steps

from horovod.base.errors import OperationCode

pytestmark = pytest.mark.timeout(580)

PAGE = "CONTRIBUTING.md"
CHAPTERS = ("### A type of operation: eight files", "### A reduction: five files")


def test_how_many_files_there_are_to_touch() -> None:
    assert [len({step.file for step in steps(PAGE, chapter)}) for chapter in CHAPTERS] == [8, 5]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A copy with both toys."""
    copy = Tree(tmp_path_factory.mktemp("tree"), ["csrc"])
    for chapter in CHAPTERS:
        copy.follow(steps(PAGE, chapter))
    build = copy.folder / "build"
    pybind11 = subprocess.run([sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True)
    assert pybind11.returncode == 0, pybind11.stderr
    run(
        *(tool("cmake"), "-S", str(copy.folder / "csrc"), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=None"),
        *("-DCMAKE_CXX_FLAGS=-O0 -g0", "-DHOROVOD_WERROR=ON", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"),
        *(f"-Dpybind11_DIR={pybind11.stdout.strip()}", f"-DPython_EXECUTABLE={sys.executable}"),
    )
    run(tool("cmake"), "--build", str(build), "-j", str(os.cpu_count()), "--target", "_core", "horovod_protos")
    (core,) = build.glob("_core*.so")
    copy.use(core, build / "protos/horovod/protos")
    return copy


def test_they_run_in_every_world_and_are_compared_by_the_coordinator(tree: Tree) -> None:
    """Over shared memory and TCP with 2 and 4 ranks, hosts and Gloo; asynchronous, grouped; timeline, names, checks."""
    said = tree.test("tests/engine/test_every_operation.py")
    for test in (
        *(f"single_and_grouped_operations[{world}-gather] PASSED" for world in ("2-shm", "2-tcp", "4-shm", "4-tcp")),
        *(f"test_reductions[{world}-mask] PASSED" for world in ("2-shm", "2-tcp", "4-shm", "4-tcp")),
        "what_the_traits_say[gather] PASSED",
        "timeline_has_their_names PASSED",
    ):
        assert test in said, said


def test_scripts_call_them(tree: Tree) -> None:
    pytest.importorskip("torch", reason="make build installs it")
    script = (
        "import horovod.torch as hvd, torch\n"
        "hvd.init()\n"
        "assert hvd.gather(torch.tensor([3, 4]), root_rank=0).tolist() == [3, 4]\n"
        "assert hvd.synchronize(hvd.gather_async(torch.tensor([5]), 0, name='x')).tolist() == [5]\n"
        "assert hvd.allreduce(torch.tensor([6]), op=hvd.ReduceOp.MASK).tolist() == [6]\n"
        "for wrong in (lambda: hvd.gather(torch.ones(1), root_rank=1),\n"
        "              lambda: hvd.allreduce(torch.ones(1), op=hvd.ReduceOp.MASK)):\n"
        "    try:\n"
        "        wrong()\n"
        "    except ValueError as refusal:\n"
        "        print(refusal)\n"
        "    else:\n"
        "        raise AssertionError('not refused')\n"
    )
    of_root, of_type = tree.python("-c", script).splitlines()
    assert re.search(ends_with(OperationCode.INVALID_ROOT, "Gather", "root_rank 1"), of_root)
    assert re.search(ends_with(OperationCode.UNDEFINED_REDUCTION, "Mask of float32"), of_type)


def test_the_public_names_are_pinned(tree: Tree) -> None:
    said = tree.test("tests/torch/test_api.py")
    assert "test_signature[gather] PASSED" in said
