"""HOROVOD_WIRE from the setting to the sums: keys that only a pair knows, worlds and process sets in each mode."""

from __future__ import annotations

from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest
from error_codes import ends_with
from runtime_harness import allreduce_all, await_first, close_all, form_threads, world
from test_handshake import sides

from horovod._core import DType, OpSpec, OpType
from horovod.base.errors import WorldCode
from horovod.base.settings import WIRE_MODES, resolve
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.worker.runtime.devices import gpu_operations
from horovod.worker.runtime.epoch import begin
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.formation import Context
from horovod.worker.runtime.handshake import Connecting, Listening


def shaken(one: Connecting, other: Listening) -> tuple[bytes, bytes]:
    other.feed(one.take_output())
    one.feed(other.take_output())
    assert other.wire_keys == b"", "no keys before the proof"
    other.feed(one.take_output())
    return one.wire_keys, other.wire_keys


def test_both_ends_have_the_same_two_keys_and_no_two_connections_have() -> None:
    seen = set()
    for _ in range(4):
        one, other = shaken(*sides())
        assert len(one) == len(other) == 64
        assert (one[:32], one[32:]) == (other[32:], other[:32])
        seen |= {one[:32], one[32:]}
    assert len(seen) == 8


def sums(context: Context) -> array[float]:
    """Of 100,000 numbers, which take many records, beside small ones that travel with the order."""
    data = array("f", [context.world.rank + 1.0]) * 100_000
    pointer = data.buffer_info()[0]
    handle = context.engine.submit(
        OpSpec(OpType.ALLREDUCE), "allreduce.large", [(pointer, pointer, DType.FLOAT32, (len(data),))]
    )
    handle.result()
    return data


@pytest.mark.parametrize("mode", WIRE_MODES)
def test_worlds(coordinator: EmbeddedCoordinator, mode: str) -> None:
    with world(coordinator.address, size=3, transport="tcp", wire=mode, connections_per_peer=2) as contexts:
        assert all(context.transport == "tcp" for context in contexts)
        for step in range(5):
            assert allreduce_all(contexts, f"small.{step % 2}") == [3.0] * 3
        with ThreadPoolExecutor(3) as pool:
            for data in pool.map(sums, contexts):
                assert set(data) == {6.0}


@pytest.mark.parametrize("mode", WIRE_MODES)
def test_connections_between_partners_only(coordinator: EmbeddedCoordinator, mode: str) -> None:
    """Rank r of 6 is connected to all but r + 3, by two connections each."""
    with world(
        coordinator.address, size=6, transport="tcp", wire=mode, connections_per_peer=2, full_mesh_members=5
    ) as contexts:
        assert {len(context.socket_inodes) for context in contexts} == {2 * 4}
        for step in range(5):
            assert allreduce_all(contexts, f"small.{step % 2}") == [6.0] * 6
        with ThreadPoolExecutor(6) as pool:
            for data in pool.map(sums, contexts):
                assert set(data) == {21.0}


def test_a_process_set_has_keys_of_its_own(coordinator: EmbeddedCoordinator) -> None:
    settings = resolve({}, {"coordinator": coordinator.address, "size": 3, "transport": "tcp", "wire": "encrypted"})
    with ThreadPoolExecutor(3) as pool:
        contexts = [future.result() for future in [pool.submit(begin, settings, [[0, 2]]) for _ in range(3)]]
    contexts.sort(key=lambda context: context.world.rank)
    try:
        assert allreduce_all(contexts, "all") == [3.0] * 3

        def in_set(context: Context) -> float:
            data = array("f", [1.0])
            pointer = data.buffer_info()[0]
            spec = OpSpec(OpType.ALLREDUCE, process_set=1)
            context.engine.submit(spec, "allreduce.set", [(pointer, pointer, DType.FLOAT32, (1,))]).result()
            return data[0]

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(in_set, [contexts[0], contexts[2]])) == [2.0, 2.0]
    finally:
        close_all(contexts)


def test_ranks_must_agree_on_it(coordinator: EmbeddedCoordinator) -> None:
    def start(mode: str) -> None:
        begin(resolve({}, {"coordinator": coordinator.address, "size": 2, "wire": mode}))

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(start, "encrypted")
        assert await_first(coordinator)
        with pytest.raises(StartError, match=ends_with(WorldCode.MEMBERS_DISAGREE, "wire", "'plain'", "'encrypted'")):
            start("plain")
        assert not first.done()
        coordinator.give_up("default", "The other one was refused.")
        assert isinstance(first.exception(60), StartError)


def test_nccl_is_not_chosen_by_itself() -> None:
    everything = 0b11111
    for given, expected in (
        ({}, {"nccl_operations": 0, "host_operations": everything}),
        ({"gpu_operations": "nccl"}, {"nccl_operations": everything, "host_operations": 0}),
    ):
        assert gpu_operations(resolve({}, {"wire": "signed", **given})) == expected


def test_shared_memory_needs_none(coordinator: EmbeddedCoordinator) -> None:
    contexts = form_threads(coordinator.address, 2, wire="encrypted")
    try:
        assert contexts[0].transport == "shm"
        assert allreduce_all(contexts, "x") == [2.0, 2.0]
    finally:
        close_all(contexts)
