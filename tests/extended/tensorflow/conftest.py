"""Worlds of ranks with TensorFlow, or the reason why there are none."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from worlds import Keeper, World

if importlib.util.find_spec("tensorflow") is None:

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        for item in items:
            if "tensorflow" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="tensorflow is not installed"))


@pytest.fixture(scope="session")
def tf_pair_keeper() -> Iterator[Keeper]:
    with Keeper(2, "shm", {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, preloaded="preloaded_tensorflow") as keeper:
        yield keeper


@pytest.fixture
def tf_pair(tf_pair_keeper: Keeper) -> World:
    """A running world of two ranks over shared memory."""
    return tf_pair_keeper.get()


@pytest.fixture(scope="session")
def torch_pair_keeper() -> Iterator[Keeper]:
    with Keeper(2, "shm", {"KERAS_BACKEND": "torch"}, preloaded="preloaded_keras_torch") as keeper:
        yield keeper


@pytest.fixture
def torch_pair(torch_pair_keeper: Keeper) -> World:
    """The same, where Keras runs on PyTorch."""
    return torch_pair_keeper.get()


@pytest.fixture(scope="session")
def legacy_pair_keeper() -> Iterator[Keeper]:
    if importlib.util.find_spec("tf_keras") is None:
        pytest.skip("tf_keras is not installed")
    environment = {"TF_USE_LEGACY_KERAS": "1", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    with Keeper(2, "shm", environment, preloaded="preloaded_tf_keras") as keeper:
        yield keeper


@pytest.fixture
def legacy_pair(legacy_pair_keeper: Keeper) -> World:
    """The same, where tf.keras is tf_keras."""
    return legacy_pair_keeper.get()
