"""What the kernel tells of a coordinator's connections. test_elastic_partitions.py has hosts that are silent."""

from __future__ import annotations

import socket

import pytest

from horovod.coordinator.services.sights import _connections, address_of, unacknowledged


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:5000", ("10.0.0.1", 5000)),
        ("ipv6:%5Bfd77::1%5D:5000", ("fd77::1", 5000)),
        ("ipv6:[::ffff:10.0.0.1]:5000", ("10.0.0.1", 5000)),
        ("unix:/tmp/socket", None),
        ("ipv4:nonsense", None),
        ("", None),
    ],
)
def test_names_of_the_other_end(peer: str, address: tuple[str, int] | None) -> None:
    assert address_of(peer) == address


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")])
def test_connections_of_a_port(family: int, host: str) -> None:
    """A listener of both kinds of addresses has connections of IPv4, too."""
    with socket.create_server((host, 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        try:
            found = dict(_connections(family, port))
            assert found == {one.getsockname(): 0 for one in connections}
            assert unacknowledged(port) == set()
        finally:
            for one in connections:
                one.close()
