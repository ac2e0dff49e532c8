"""What importing a part says whose framework is not there."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from horovod.base.frameworks import FRAMEWORKS


@pytest.mark.parametrize(
    ("module", "framework"),
    [
        *((one.module, one.name) for one in FRAMEWORKS if one.module != "torch"),  # horovod itself is there with it
        *(("ray", "Ray"), ("spark", "PySpark")),
    ],
)
def test_without_its_framework_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str, framework: str
) -> None:
    for name in (module, f"pytorch_{module}", f"py{module}"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    for name in [name for name in sys.modules if name.startswith(f"horovod.{module}")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=rf"{framework}, which is not installed.* pip install 'horovod\[{module}\]'"):
        importlib.import_module(f"horovod.{module}")


def test_mxnet_beside_a_numpy_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mxnet.py").write_text("import math\nmath.bool")  # as it asks for numpy.bool
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mxnet", raising=False)
    with pytest.raises(ImportError, match=r"can't be imported with this NumPy .* pip install 'horovod\[mxnet\]'"):
        importlib.import_module("horovod.mxnet")


def test_another_name_is_python_s_own_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'horovod\.fly'$"):
        importlib.import_module("horovod.fly")
