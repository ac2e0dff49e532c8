"""The reader and the stores need packages that the short tier does not install."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

MISSING = [name for name in ("fsspec", "pyarrow", "pyspark") if importlib.util.find_spec(name) is None]

if MISSING:

    class _Skipped(pytest.Module):
        def collect(self) -> list[Any]:
            pytest.skip(f"{', '.join(MISSING)} not installed", allow_module_level=True)

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
        return _Skipped.from_parent(parent, path=module_path)
