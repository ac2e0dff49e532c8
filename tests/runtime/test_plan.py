"""What a start asks for and chooses follows from values alone: no coordinator, no socket, no clock."""

from __future__ import annotations

import pytest

from horovod.base.settings import resolve
from horovod.protos.v1 import membership_pb2
from horovod.worker.runtime.plan import Transport, request_to_join
from horovod.worker.runtime.world import Endpoint


@pytest.mark.parametrize(
    ("transport", "name", "sharing", "connects"),
    [
        (Transport(0, 1, False, []), "none", 0, False),
        (Transport(1, 3, True, []), "shm", 2, False),
        (Transport(1, 3, False, []), "tcp", 0, True),
        (Transport(1, 4, False, [0, 0, 1, 1]), "tcp+shm", 1, True),
        (Transport(3, 4, False, [0, 0, 0, 1]), "tcp+shm", 0, True),
    ],
)
def test_transports(transport: Transport, name: str, sharing: int, connects: bool) -> None:
    assert (transport.name, transport.sharing, transport.connects) == (name, sharing, connects)


def test_a_request_has_what_all_ranks_must_agree_on_and_what_peers_need() -> None:
    settings = resolve({}, {"coordinator": "c:1", "size": 4, "rank": 2, "job": "digits"})
    host = membership_pb2.HostIdentity(name="h1", shared_memory_domain="d")
    request = request_to_join(settings, [(0, 2)], host, [Endpoint("10.0.0.1", 7, "eth0")], "segment")
    assert (request.job, request.size, request.requested_rank, request.host) == ("digits", 4, 2, host)
    assert [(e.address, e.port, e.interface) for e in request.endpoints] == [("10.0.0.1", 7, "eth0")]
    assert request.segment_address == "segment"
    assert request.options["process_sets"] == "[[0, 2]]"
    assert request == request_to_join(settings, [[0, 2]], host, [Endpoint("10.0.0.1", 7, "eth0")], "segment")
    assert not request.member_id, "another one for each attempt"
    others = request_to_join(settings, [range(n, n + 50) for n in range(50)], host, [], "").options["process_sets"]
    assert len(others) < 200
    assert "sha256" in others
