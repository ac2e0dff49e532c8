"""The world as a value: ranks, labels, homogeneity, whether memory can be shared, and what a bad message is told."""

from __future__ import annotations

import dataclasses

import pytest
from error_codes import ends_with

from horovod.base.errors import EngineCode
from horovod.protos.v1 import membership_pb2
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.world import Endpoint, World


def message(*hosts: str, secret: bytes = b"s" * 32) -> membership_pb2.World:
    """Each member on a host entry of its own, which is not how a coordinator writes it, but allowed."""
    world = membership_pb2.World(job="job", epoch=7, secret=secret)
    for rank, host in enumerate(hosts):
        identity = membership_pb2.HostIdentity(name=host, shared_memory_domain="domain")
        world.hosts.add(identity=identity).interfaces.add(address="10.0.0.1", name="eth0")
        member = world.members.add(host=rank, member_id=f"m{rank}", pid=100 + rank, segment_address=f"s{rank}")
        member.interfaces.append(0)
        member.ports.append(5000 + rank)
        world.local_ranks.append(hosts[:rank].count(host))
        world.cross_ranks.append(len({*hosts[:rank]} - {host}))
    return world


def test_a_world_of_one():
    world = World.of_one("job", "node-a", 4242)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert (world.cross_rank, world.cross_size, world.is_homogeneous) == (0, 1, True)
    assert world.label(0) == "rank 0 (pid 4242) on host node-a"


def test_a_message_becomes_a_world_seen_from_this_member():
    world = World.from_message(message("a", "a", "b"), "m1")
    assert (world.epoch, world.rank, world.size, world.local_rank, world.local_size) == (7, 1, 3, 1, 2)
    assert world.label(2) == "rank 2 (pid 102) on host b"
    assert world.members[2].endpoints == (Endpoint("10.0.0.1", 5002, "eth0"),)
    assert [(m.cross_rank, m.cross_size) for m in world.members] == [(0, 2), (0, 1), (1, 2)]
    assert not world.is_homogeneous
    assert World.from_message(message("a", "a", "b", "b"), "m0").is_homogeneous


def test_a_world_never_changes_and_never_shows_its_secret():
    world = World.from_message(message("a", "a"), "m1")
    with pytest.raises(dataclasses.FrozenInstanceError):
        world.epoch = 8  # type: ignore[misc]
    assert "sss" not in repr(world)


@pytest.mark.parametrize("broken", ["host", "interface", "ports", "places", "missing me", "me twice", "short secret"])
def test_a_message_that_is_no_world_is_refused(broken):
    world = message("a", "a", secret=b"short" if broken == "short secret" else b"s" * 32)
    if broken == "host":
        world.members[0].host = 2
    if broken == "interface":
        world.members[0].interfaces[0] = 1
    if broken == "ports":
        world.members[0].ports.append(1)
    if broken == "places":
        world.local_ranks.append(0)
    if broken == "me twice":
        world.members[0].member_id = "m1"
    with pytest.raises(StartError, match=ends_with(EngineCode.INTERNAL, "'job'", "number 7")):
        World.from_message(world, "m9" if broken == "missing me" else "m1")


def test_memory_is_shared_on_one_host_in_one_domain_only():
    assert World.from_message(message("a", "a"), "m0").why_not_shared_memory() is None
    assert "another host" in (World.from_message(message("a", "b"), "m0").why_not_shared_memory() or "")
    elsewhere = message("a", "a")
    elsewhere.hosts[1].identity.shared_memory_domain = "other"
    assert "rank 1" in (World.from_message(elsewhere, "m0").why_not_shared_memory() or "")
    without = message("a", "a")
    without.members[1].segment_address = ""
    assert "no shared-memory segment" in (World.from_message(without, "m0").why_not_shared_memory() or "")


def test_endpoints_read_well():
    assert str(Endpoint("10.0.0.1", 5, "eth0")) == "10.0.0.1:5 (eth0)"
    assert str(Endpoint("fd00::1", 5)) == "[fd00::1]:5"


def test_which_ranks_share_memory_where_not_all_do():
    assert World.from_message(message("a", "a", "b", "a", "b"), "m0").sharing_hosts() == [0, 0, 2, 0, 2]
    assert World.from_message(message("a", "b", "c"), "m0").sharing_hosts() == []
    split = message("a", "a", "b", "b")
    split.hosts[1].identity.shared_memory_domain = "another container"
    assert World.from_message(split, "m2").sharing_hosts() == [0, 1, 2, 2]
    split.members[3].segment_address = ""
    assert World.from_message(split, "m3").sharing_hosts() == []
