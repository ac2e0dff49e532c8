"""How patient a coordinator is with its members (docs/adr/0015-liveness.md)."""

from dataclasses import dataclass

KEEPALIVE_S = 5.0  # between two pings


@dataclass(frozen=True)
class Limits:
    """keepalive_timeout_s: after which a connection that answers no ping of gRPC counts as broken.
    reattach_grace_s: how long a member may be without a connection before it is lost, unless its process is seen to
    live.
    """

    keepalive_timeout_s: float = 20.0
    reattach_grace_s: float = 10.0

    @property
    def tick_s(self) -> float:
        """How often the coordinator looks who is overdue."""
        return max(0.02, min(1.0, self.reattach_grace_s / 4))

    def channel_options(self) -> tuple[tuple[str, int], ...]:
        """gRPC's. Its threads send and answer pings without Python, so a member answers also while it holds the GIL."""
        timeout_ms = max(1, int(self.keepalive_timeout_s * 1000))
        return (
            ("grpc.keepalive_time_ms", max(1, min(int(KEEPALIVE_S * 1000), timeout_ms))),
            ("grpc.keepalive_timeout_ms", timeout_ms),
            ("grpc.http2.ping_timeout_ms", timeout_ms),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        )
