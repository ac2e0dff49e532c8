"""Limits that both ends of a connection to a coordinator must know."""

from __future__ import annotations

from typing import Final

KEEPALIVE_S: Final = 5.0  # seconds between two pings
# The largest message about a world that a member accepts. Enough for 65,536 members.
MAX_WORLD_MESSAGE_BYTES: Final = 64 << 20


def ping_options(timeout_s: float, interval_s: float = KEEPALIVE_S) -> tuple[tuple[str, int], ...]:
    """gRPC's options by which one end notices that the other one is gone.

    gRPC's threads send and answer pings without Python, so a process answers also while it holds the GIL.
    timeout_s: after which a connection on which a ping is not answered counts as broken.
    """
    timeout_ms = max(1, int(timeout_s * 1000))
    return (
        ("grpc.keepalive_time_ms", max(1, min(int(interval_s * 1000), timeout_ms))),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
