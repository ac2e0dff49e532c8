"""The reader and the stores need packages that the short tier does not install."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import object_stores
import pytest

MISSING = [name for name in ("fsspec", "pyarrow", "pyspark") if importlib.util.find_spec(name) is None]

if MISSING:

    class _Skipped(pytest.Module):
        def collect(self) -> list[Any]:
            pytest.skip(f"{', '.join(MISSING)} not installed", allow_module_level=True)

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
        return _Skipped.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def services() -> Iterator[Callable[[str], object_stores.Service]]:
    """The object stores, each from its first use to the end of all tests."""
    with ExitStack() as stack:
        running: dict[str, object_stores.Service] = {}

        def of_kind(kind: str) -> object_stores.Service:
            if kind not in running:
                running[kind] = stack.enter_context(object_stores.service(kind))
            return running[kind]

        yield of_kind
