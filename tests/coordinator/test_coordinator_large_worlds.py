"""What it costs to form a world of thousands: messages by their number, and bytes of each member."""

import pytest
from coordinator_builders import request
from membership_story import Story

from horovod.base.protocol import MAX_WORLD_MESSAGE_BYTES
from horovod.coordinator.core.ranks import Seat, assign
from horovod.coordinator.core.world.effects import Form, Send
from horovod.coordinator.core.world.membership import Membership
from horovod.coordinator.core.world.waiting import Formation
from horovod.protos.v1 import membership_pb2 as pb

MEMBERS = 4096
HOST_MEMBERS = 8
SECONDS = 10.0  # in which they all join


def realistic(index: int, size: int = MEMBERS) -> pb.JoinRequest:
    """With what a member of a cluster says of itself."""
    host = f"gpu-node-{index // HOST_MEMBERS:05}.cluster.example"
    made = request(f"memberid{index:08}", size=size, host=host, rank=index, pid=100_000 + index)
    made.host.shared_memory_domain = f"0123abcd-4567-89ab-cdef-{index // HOST_MEMBERS:012}/4026531836/1000"
    made.segment_address = f"memfd:{100_000 + index}:12:0123456789abcdef"
    made.process.namespace, made.process.start_time = made.host.shared_memory_domain[:47], 123_456_789
    made.options["fusion_threshold_bytes"] = "134217728"
    del made.endpoints[:]
    for interface in range(2):
        address = f"10.{interface}.{index // HOST_MEMBERS // 250}.{index // HOST_MEMBERS % 250}"
        made.endpoints.add(address=address, port=40_000 + index % 20_000, interface=f"eth{interface}")
    return made


def test_progress_costs_as_many_messages_as_there_are_members_in_each_interval() -> None:
    story = Story()
    for index in range(MEMBERS):
        story.pass_time(SECONDS / MEMBERS)
        refusal, effects = story.membership.join(realistic(index), story.now_s)
        assert refusal == ""
        story.take(effects)
    messages = sum(len(events) for events in story.told.values())
    assert all(events[-1].HasField("world") for events in story.told.values())
    assert len(story.progress("memberid00000000")) > 3
    assert messages < MEMBERS + 1500 * SECONDS, "at most about 1,000 a second, however many wait"
    assert max(len(events) for events in story.told.values()) < SECONDS / 0.2 + 2


def test_the_last_state_is_told_however_fast_they_came() -> None:
    story = Story()
    for index in range(MEMBERS - 1):
        story.take(story.membership.join(realistic(index), 0.0)[1])
    assert sum(len(events) for events in story.told.values()) == 1
    story.pass_time(10.0)
    assert all(events[-1].progress.sentence.endswith("waiting for rank 4095.") for events in story.told.values())


@pytest.mark.parametrize("size", [64, MEMBERS])
def test_a_member_takes_few_bytes_of_the_world(size: int) -> None:
    requests = {one.member_id: one for one in (realistic(index, size) for index in range(size))}
    places = assign([Seat(one.member_id, one.host.name, one.requested_rank) for one in requests.values()])
    assert isinstance(places, tuple)
    world = Formation("digits", requests, places).world(1, b"s" * 32)
    assert world.ByteSize() < 110 * size + 1000
    assert world.ByteSize() / size * (1 << 16) < MAX_WORLD_MESSAGE_BYTES / 4
    assert world.hosts[1].identity.name == "gpu-node-00001.cluster.example"
    last = world.members[-1]
    assert [world.hosts[last.host].interfaces[place].name for place in last.interfaces] == ["eth0", "eth1"]
    assert world.local_ranks[-1] == HOST_MEMBERS - 1


def test_a_world_that_no_message_holds_is_refused_in_words() -> None:
    membership = Membership()
    for index in range(64):
        made = realistic(index, 64)
        made.endpoints[0].interface = "x" * 4096
        for _ in range(250):
            made.endpoints.add(address="10.0.0.1", port=1, interface="y" * 4000)
        refusal, effects = membership.join(made, 0.0)
        assert not any(isinstance(effect, Form) for effect in effects)
        if refusal:
            break
    assert "HOROVOD_NETWORK_INTERFACES" in refusal
    assert "rank 33 " in refusal or "rank 32 " in refusal


def test_effects_of_a_mass_of_members_that_break_away_are_few() -> None:
    story = Story()
    for index in range(512):
        story.take(story.membership.join(realistic(index, 512), 0.0)[1])
    effects = [
        effect
        for index in range(512)
        for effect in story.membership.disconnected(f"memberid{index:08}", 1.0)
        if isinstance(effect, Send)
    ]
    assert len(effects) <= 2 * 512, "two witnesses of each are asked, at most"
