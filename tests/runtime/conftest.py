"""Fixtures of the runtime's tests: a clean environment and a real coordinator."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from runtime_harness import leave_out_threads_of_earlier_tests

from horovod.coordinator.server import EmbeddedCoordinator


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _own_threads() -> None:
    leave_out_threads_of_earlier_tests()


@pytest.fixture
def coordinator() -> Iterator[EmbeddedCoordinator]:
    with EmbeddedCoordinator() as running:
        yield running
