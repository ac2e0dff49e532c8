"""Parts of the API that do not exist yet say so when they are imported."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import horovod
from horovod.absent import AbsentModules
from horovod.common import util


@pytest.mark.parametrize(
    "name",
    ["mxnet", "mxnet.mpi_ops"],
)
def test_importing_it_says_so(name: str) -> None:
    with pytest.raises(ImportError, match=r"is not there in this version of Horovod \(.+\): .+\.$") as error:
        importlib.import_module(f"horovod.{name}")
    assert error.value.name == f"horovod.{name.partition('.')[0]}"


def test_what_is_not_there_is_neither_found_nor_built() -> None:
    assert importlib.util.find_spec("horovod.mxnet") is None
    assert not util.extension_available("mxnet")


@pytest.mark.parametrize(
    ("module", "framework"),
    [("tensorflow", "TensorFlow"), ("keras", "Keras"), ("ray", "Ray"), ("jax", "JAX"), ("lightning", "Lightning")],
)
def test_without_its_framework_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str, framework: str
) -> None:
    for name in (module, f"pytorch_{module}"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    for name in [name for name in sys.modules if name.startswith(f"horovod.{module}")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=rf"{framework}, which is not installed.* pip install 'horovod\[{module}\]'"):
        importlib.import_module(f"horovod.{module}")


def test_another_name_is_python_s_own_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'horovod\.fly'$"):
        importlib.import_module("horovod.fly")


def test_a_package_that_exists_is_imported(tmp_path: Path) -> None:
    (tmp_path / "mxnet.py").write_text("there = True")
    script = f"import horovod; horovod.__path__.append({str(tmp_path)!r}); import horovod.mxnet as m; assert m.there"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_one_finder_however_often_it_is_imported() -> None:
    importlib.reload(horovod)
    assert sum(isinstance(finder, AbsentModules) for finder in sys.meta_path) == 1
