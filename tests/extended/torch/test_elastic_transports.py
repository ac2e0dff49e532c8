"""Elastic worlds shrink and grow on every kind of data plane; tests/torch has them on the plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from event_words import NO_GLOO
from test_changing_worlds import _assert_trained_as_one, _be_killed
from worlds import World

from horovod import _core

SPARSE = {"HOROVOD_FULL_MESH_MEMBERS": "1"}
WIRES = [{"HOROVOD_WIRE": mode} for mode in ("signed", "encrypted")]
PLANES = {
    "signed": ("tcp", WIRES[0]),
    "encrypted": ("tcp", WIRES[1]),
    "encrypted-hosts": ("hosts", WIRES[1]),
    "sparse": ("tcp", SPARSE),
    "sparse-encrypted": ("tcp", {**SPARSE, **WIRES[1]}),
    "sparse-hosts": ("hosts", SPARSE),
    "two-connections": ("tcp", {"HOROVOD_CONNECTIONS_PER_PEER": "2"}),
    "gloo": ("auto", {"HOROVOD_CPU_OPERATIONS": "gloo"}),
}
SIZE = 4


def _world(plane: str) -> World:
    transport, environment = PLANES[plane]
    if plane == "gloo" and NO_GLOO in _core.gloo_obstacle():
        pytest.skip("built without Gloo (libgloo-dev was not there)")
    return World(SIZE, transport, {**environment, "HOROVOD_MIN_SIZE": "1", "HOROVOD_MAX_SIZE": str(SIZE)})


@pytest.mark.parametrize("plane", PLANES)
def test_a_world_shrinks(plane: str) -> None:
    with _world(plane) as world:
        outcomes = world.outcomes(_be_killed, [0, 2])
    assert [outcome.text for outcome in outcomes] == [""] * SIZE
    for rank in (1, 3):
        assert outcomes[rank].value["worlds"][-1][1] == 2
        _assert_trained_as_one(outcomes[rank].value)


@pytest.mark.parametrize("plane", PLANES)
def test_a_world_grows_again(plane: str, tmp_path: Path) -> None:
    with _world(plane) as world:
        outcomes = world.outcomes(_be_killed, [1], SIZE, lives=str(tmp_path / "lives"), before_replacing=[lambda: None])
    assert [outcome.text for outcome in outcomes] == [""] * SIZE
    for rank, outcome in enumerate(outcomes):
        assert [size for _, size in outcome.value["worlds"]] == ([SIZE] if rank == 1 else [SIZE, SIZE - 1, SIZE])
        if rank != 1:
            first, fewer, again = outcome.value["connections"]
            assert bool(first & fewer & again) == (plane != "two-connections")
        _assert_trained_as_one(outcome.value)
