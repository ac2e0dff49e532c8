"""The steps of CONTRIBUTING.md for a new type of operation and a new reduction, taken in a copy of the tree: what is
tested is the page. The copy is built without optimization and runs the tests of all operations, the new ones among
them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
from native_builds import ROOT, run, tool

pytestmark = pytest.mark.timeout(580)

STEP = re.compile(
    r"(?P<new>New\sfile|In)\s`(?P<file>[^`]+)`(?:,\s(?P<where>after|before)\s`(?P<anchor>[^`]+)`)?:\n\n"
    r"```[a-z+]+\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
# The folders of the package, by where they are installed.
PACKAGES = dict(re.findall(r'^"(horovod[\w/]*)" = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
COPIED = ("csrc", "protos", "tests", "pyproject.toml", *{Path(source).parts[0] for source in PACKAGES.values()})


@dataclass(frozen=True)
class Step:
    file: str
    text: str
    where: str  # after or before the one line that begins with `anchor`; "": it is all of a new file
    anchor: str

    def apply(self, tree: Path) -> None:
        path = tree / self.file
        if not self.where:
            assert not path.exists(), f"{self.file} is there already"
            path.write_text(self.text)
            return
        lines = path.read_text().splitlines(keepends=True)
        found = [number for number, line in enumerate(lines) if line.lstrip().startswith(self.anchor.lstrip())]
        assert len(found) == 1, f"{self.file} has {len(found)} lines that begin with {self.anchor!r}"
        lines.insert(found[0] + (self.where == "after"), self.text)
        path.write_text("".join(lines))


def steps(chapter: str) -> list[Step]:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    _, found, text = page.partition(f"\n### {chapter}")
    assert found, chapter
    text = text.partition("\n### ")[0]
    matches = list(STEP.finditer(text))
    assert len(matches) == len(re.findall("^```", text, re.MULTILINE)) // 2, "a block lacks its place"
    return [Step(match["file"], match["text"], match["where"] or "", match["anchor"] or "") for match in matches]


def test_how_many_files_there_are_to_touch() -> None:
    assert len({step.file for step in steps("A type of operation: eight files")}) == 8
    assert len({step.file for step in steps("A reduction: five files")}) == 5


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with both toys, and the package as users import it in its folder `site`."""
    copy = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    for step in [*steps("A type of operation: eight files"), *steps("A reduction: five files")]:
        step.apply(copy)
    build = copy / "build"
    pybind11 = subprocess.run([sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True)
    assert pybind11.returncode == 0, pybind11.stderr
    run(
        *(tool("cmake"), "-S", str(copy / "csrc"), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=None"),
        *("-DCMAKE_CXX_FLAGS=-O0 -g0", "-DHOROVOD_WERROR=ON", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"),
        *(f"-Dpybind11_DIR={pybind11.stdout.strip()}", f"-DPython_EXECUTABLE={sys.executable}"),
    )
    run(tool("cmake"), "--build", str(build), "-j", str(os.cpu_count()), "--target", "_core", "horovod_protos")
    package = copy / "site" / "horovod"
    package.mkdir(parents=True)
    (core,) = build.glob("_core*.so")
    for source in (*(copy / PACKAGES["horovod"]).iterdir(), core):
        (package / source.name).symlink_to(source)
    for installed, folder in PACKAGES.items():
        if installed != "horovod":
            (package.parent / installed).symlink_to(copy / folder)
    (package / "protos").symlink_to(build / "protos/horovod/protos")
    return copy


def python(tree: Path, *arguments: str) -> str:
    """Python that finds horovod in the copy and not where `make build` has installed it: without .pth files."""
    folders = (tree / "site", tree / "tests", sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTHONSAFEPATH": "1"}
    environment.pop("HOROVOD_TEST_TIER", None)  # the tests of the copy are those of `make test`
    command = [sys.executable, "-S", *arguments]
    done = subprocess.run(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_they_run_in_every_world_and_are_compared_by_the_coordinator(tree: Path) -> None:
    """Over shared memory and TCP with 2 and 4 ranks, hosts and Gloo; asynchronous, grouped; timeline, names, checks."""
    said = python(tree, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/engine/test_every_operation.py")
    for test in (
        *(f"single_and_grouped_operations[{world}-gather] PASSED" for world in ("2-shm", "2-tcp", "4-shm", "4-tcp")),
        *(f"test_reductions[{world}-mask] PASSED" for world in ("2-shm", "2-tcp", "4-shm", "4-tcp")),
        "what_the_traits_say[gather] PASSED",
        "timeline_has_their_names PASSED",
    ):
        assert test in said, said


def test_scripts_call_them(tree: Path) -> None:
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
    said = python(tree, "-c", script)
    assert "Gather: root_rank 1 is not a rank of this world" in said
    assert "Mask of float32 is not defined. It needs integers or bool." in said


def test_the_public_names_are_pinned(tree: Path) -> None:
    said = python(tree, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/torch/test_api.py")
    assert "test_signature[gather] PASSED" in said
