"""What a coordinator says reaches the log and the exceptions of a member as printable text."""

from __future__ import annotations

import logging

import pytest

from horovod.protos.v1 import membership_pb2
from horovod.worker.runtime.local_member import LocalMember
from horovod.worker.runtime.session import Session
from horovod.worker.runtime.world import World

EVIL, ESCAPED = "\x1b[2Jhi\nERROR faked", r"\x1b[2Jhi\nERROR faked"


@pytest.mark.parametrize("kind", ["progress", "refused", "gone", "leavers", "attached"])
def test_sentences_of_events(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "horovod")
    event = membership_pb2.MembershipEvent()
    part = event.attached.gone.add(epoch=1) if kind == "attached" else getattr(event, kind)
    part.sentence = EVIL
    session = Session("127.0.0.1:1")
    attempt = LocalMember(session.streams, membership_pb2.JoinRequest(), grace_seconds=10.0)
    attempt.on_event(event)
    session.close()
    assert part.sentence == ESCAPED
    assert all(record.getMessage().isprintable() for record in caplog.records)
    assert ESCAPED in attempt.reason or kind != "refused"


def test_names_of_hosts_and_interfaces() -> None:
    host = membership_pb2.Host(identity=membership_pb2.HostIdentity(name=EVIL))
    host.interfaces.add(address="10.0.0.1", name=EVIL)
    member = membership_pb2.Member(member_id="m", pid=1, interfaces=[0], ports=[1])
    message = membership_pb2.World(job="job", epoch=1, members=[member], secret=bytes(32), hosts=[host])
    message.local_ranks.append(0)
    message.cross_ranks.append(0)
    world = World.from_message(message, "m")
    assert world.label(0) == f"rank 0 (pid 1) on host {ESCAPED}"
    assert str(world.me.endpoints[0]) == f"10.0.0.1:1 ({ESCAPED})"
