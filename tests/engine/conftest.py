"""Fixtures of tests with GPUs, and the folder's modules for all tests in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from gpu_world import GpuWorld, StandIns


@pytest.fixture(scope="module")
def libraries() -> StandIns:
    return StandIns()


@pytest.fixture(params=["in_process", "tcp"])
def pair(request: pytest.FixtureRequest, libraries: StandIns) -> Iterator[GpuWorld]:
    """Two ranks with a GPU each."""
    with GpuWorld(libraries, 2, request.param) as made:
        yield made
