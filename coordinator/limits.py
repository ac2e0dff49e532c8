"""How patient a coordinator is with its members (docs/adr/0015-liveness.md)."""

from dataclasses import dataclass

from horovod.base.limits import ping_options


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
        return ping_options(self.keepalive_timeout_s)
