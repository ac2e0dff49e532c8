"""`pip wheel .` gives one wheel; installed where no framework is, it imports, launches and negotiates."""

from __future__ import annotations

import re
import shutil
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from installing import ROOT, run
from packaging.requirements import Requirement

from horovod.base.frameworks import PACKAGES
from release import wheels

FRAMEWORKS = (*sorted(PACKAGES), "numpy")

pytestmark = pytest.mark.timeout(600)


def needed(name: str) -> set[str]:
    """The distribution `name` and all that it requires when no extra is asked for."""
    found, left = set(), [name]
    while left:
        found.add(this := left.pop())
        for requirement in map(Requirement, metadata.requires(this) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left += {requirement.name} - found
    return found


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel and what it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in needed("horovod") - {"horovod"}:
        installed = metadata.distribution(distribution)
        for name in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            place = packages / name
            if not place.exists():
                place.symlink_to(Path(str(installed.locate_file(name))))
    run(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python"),
        *("install", "--no-deps", "--no-index", wheel),
    )
    return folder / "bin"


def test_it_holds_all_packages_and_no_tests(wheel: Path) -> None:
    assert wheel.name.startswith(f"horovod-{wheels.version()}-")
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "torch/__init__.py",
        "coordinator/__main__.py",
        "worker/runtime/formation.py",
        "_core.pyi",
        "py.typed",
    ):
        assert f"horovod/{name}" in names
    protos = {Path(name).name for name in names if name.startswith("horovod/protos/") and "_pb2" in name}
    assert {"negotiation_pb2.py", "negotiation_pb2.pyi", "negotiation_pb2_grpc.py"} <= protos
    assert {"horovod/protos/messages.py", "horovod/protos/services.py"} <= set(names)
    assert sum(name.startswith("horovod/_core.") and name.endswith(".so") for name in names) == 1
    assert not [name for name in names if "tests/" in name or "__pycache__" in name]


def test_tensorflow_s_operations_are_in_it_and_bound_to_no_tensorflow(wheel: Path, tmp_path: Path) -> None:
    """It was built where TensorFlow may be installed, and is the same where none is: its own symbols tell."""
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        library = Path(content.extract("horovod/libhorovod_tensorflow.so", tmp_path))
    assert "horovod/tensorflow/library.py" in names
    assert not [name for name in names if name.endswith((".cc", ".h", ".cu", ".cmake"))]
    if shutil.which("readelf") is None:
        pytest.skip("readelf, of binutils, is not installed")
    needed_libraries = re.findall(r"NEEDED.*\[(.*?)\]", run("readelf", "--dynamic", "--wide", library))
    assert needed_libraries
    assert [name for name in needed_libraries if not re.match(r"(lib(c|m|stdc\+\+|gcc_s)|ld-linux.*)\.so", name)] == []
    symbols = run("readelf", "--dyn-syms", "--wide", library)
    assert "horovod_tensorflow_begin" in symbols
    assert re.findall(r"UND +(TF_\w+|XLA_\w+|_ZN\d+(?:tensorflow|tsl|xla)\w*)", symbols) == []


def test_jax_s_library_is_in_it_and_bound_to_no_jax(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        library = Path(content.extract("horovod/libhorovod_jax.so", tmp_path))
        assert "horovod/jax/library.py" in content.namelist()
    if shutil.which("readelf") is None:
        pytest.skip("readelf, of binutils, is not installed")
    symbols = run("readelf", "--dyn-syms", "--wide", library)
    assert "horovod_jax_begin" in symbols
    assert re.findall(r"UND +(XLA_\w+|_ZN\d+(?:jax|tsl|xla)\w*)", symbols) == []


def test_nothing_of_a_framework_is_needed_to_build_it() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    requires = text[text.index("[build-system]") : text.index("[project]")]
    assert not [name for name in FRAMEWORKS if name in requires]


def test_it_imports_without_a_framework(bare: Path, tmp_path: Path) -> None:
    program = f"""
import importlib, importlib.util
assert not [name for name in {FRAMEWORKS!r} if importlib.util.find_spec(name)]
import horovod, horovod.protos, horovod._core, horovod.coordinator.server, horovod.worker.agent.supervisor
assert horovod.__version__ == {wheels.version()!r} and callable(horovod.run)
for module in ("torch", "tensorflow", "keras", "tensorflow.keras"):
    try:
        importlib.import_module("horovod." + module)
    except ImportError as error:
        print(error)
"""
    said = run(bare / "python", "-c", program, cwd=str(tmp_path)).splitlines()
    assert "torch" in said.pop(0)
    for line, module in zip(said, ("tensorflow", "keras", "tensorflow"), strict=True):
        assert line.startswith(f"horovod.{module} needs"), said
        assert f"'horovod[{module}]'" in line


def test_its_commands_run_without_a_framework(bare: Path, tmp_path: Path) -> None:
    said = run(bare / "horovodrun", "--check-build", cwd=str(tmp_path))
    for name in ("TensorFlow", "PyTorch"):
        assert f"[ ] {name}" in said
    program = "import horovod.common.basics as hvd; hvd.init(); print(hvd.rank(), hvd.size())"
    said = run(
        bare / "horovodrun", "--start-timeout", "200", "-np", "2", bare / "python", "-c", program, cwd=str(tmp_path)
    )
    assert sorted(said.splitlines()) == ["[0]<stdout>:0 2", "[1]<stdout>:1 2"]
