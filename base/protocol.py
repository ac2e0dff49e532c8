"""What both ends of a connection to a coordinator must know: the release, the language that they speak, limits."""

from __future__ import annotations

from importlib import metadata
from typing import Final

# The language of coordinators, agents, launchers and members, each of which says it first. Who speaks another one is
# refused in words. Releases with one number work together, so all 1.x have the same: they only add fields and calls
# (docs/adr/0120-versions.md).
PROTOCOL_VERSION: Final = 3
# What coordinators write to a store that outlives them, in the same sense.
STORE_FORMAT: Final = 1


def _version() -> str:
    try:
        return metadata.version("horovod")
    except metadata.PackageNotFoundError:  # a source tree that was never installed
        return "1.0.0"


__version__: Final = _version()


KEEPALIVE_S: Final = 5.0  # seconds between two pings
# The largest message about a world that a member accepts. Enough for 65,536 members.
MAX_WORLD_MESSAGE_BYTES: Final = 64 << 20

# Launchers say both with each call, in its metadata: the number, and their release.
PROTOCOL: Final = "horovod-protocol"
RELEASE: Final = "horovod-version"

# The relay of an agent sends this in a call's metadata, with its id. Coordinators that answer with it may send
# RelayFrames (relay.proto), whose first byte is RELAY_FRAME.
RELAY: Final = "horovod-relay"
RELAY_FRAME: Final = b"\0"


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
