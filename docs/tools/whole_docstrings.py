"""For mkdocstrings, which reads sources and imports nothing: collectives get the docstrings that `help()` shows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import griffe

_FACES = Path(__file__).parents[2] / "clients/horovod/common/ops/faces.py"


class WholeDocstrings(griffe.Extension):
    def __init__(self) -> None:
        spec = importlib.util.spec_from_file_location("faces", _FACES)
        assert spec is not None
        assert spec.loader is not None
        self._faces = sys.modules["faces"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._faces)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """After a function was read."""
        words = self._faces.words_of(func.module.path)
        if words is None or not func.parent.is_module or not self._faces.operation_of(func.name) or not func.docstring:
            return
        names = [parameter.name for parameter in func.parameters]
        func.docstring.value = self._faces.whole(words, func.name, names, func.docstring.value)
