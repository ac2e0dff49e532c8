"""The two names of Lightning: its classes exist once for each."""

from __future__ import annotations

import importlib
from typing import Any, Final

from packaging.version import Version

from horovod.base.errors import DataCode, coded

_PACKAGES: Final = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
MIN_PL_VERSION: Final = "2.0"  # the least release of either package


def package_of(model: Any) -> str | None:
    """The module that has the Trainer for a LightningModule; None for other objects."""
    for cls in type(model).__mro__:
        name = _PACKAGES.get(cls.__module__.partition(".")[0])
        if cls.__name__ == "LightningModule" and name is not None:
            return name
    return None


def import_lightning(name: str | None = None) -> Any:
    """The module, or the first one that is installed. RuntimeError for a Lightning that is too old."""
    for package in [name] if name is not None else _PACKAGES.values():
        try:
            pl = importlib.import_module(package)
        except ModuleNotFoundError:
            continue
        if Version(pl.__version__) < Version(MIN_PL_VERSION):
            sentence = (
                f"{package} {pl.__version__} is too old for the lightning TorchEstimator, which needs {MIN_PL_VERSION}."
            )
            raise RuntimeError(coded(DataCode.MISSING_DATA_PACKAGE, sentence))
        return pl
    sentence = f"{name or 'Lightning'} is not installed. Install it with: pip install 'horovod[lightning]'"
    raise ImportError(coded(DataCode.MISSING_DATA_PACKAGE, sentence))
