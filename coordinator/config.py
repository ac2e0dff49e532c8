"""What a coordinator is to be like: one value, which the command line, a launcher or rank 0 fills."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from horovod.base.addresses import loopback_listen
from horovod.base.errors import SettingCode, coded
from horovod.base.protocol import ping_options

from .core.agreement.deadlock import USUAL_TIMES, DeadlockTimes
from .exposure import TLS_ADVICE
from .services.exchange import Service
from .store import MemoryStore, Store
from .tls import ServerTls


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


KEEP_TOKEN_S = 60.0  # how often a coordinator looks whether its token can still be found


@dataclass(frozen=True)
class CoordinatorConfig:
    """listen: "127.0.0.1:29400"; port 0 lets the system choose. By default only processes of this host can connect.
    token: members must know it, or that of their job made from it; None serves every process that can connect.
    shows_token: processes of this user find the token while the coordinator runs.
    insecure: serves strangers of other hosts, too, and shows them the pages.
    advertise: HOST:PORT where members and other coordinators of the store reach this one; `listen` by default.
    tls: the certificate by which members know the coordinator, and whose members it takes.
    proves_token: shows members that it knows the token before they show theirs, over the certificate of `tls`.
    tls_advice: the end of the warning of a token that travels in the clear: how to get TLS.
    open_store: what it opens is closed with the coordinator.
    services: what else is served here, such as the way of a function to the ranks of horovod.run.
    web_listen: where to show the pages of pages.py; None: nowhere.
    web_token: asked for by all pages but the probes'; needed where other hosts can connect. None: a random one is made,
        unless `insecure`.
    web_tls: shows the pages over HTTPS, with the certificate of `tls`.
    told_level: at which the log repeats what rank 0 shows to the user.
    """

    listen: str = field(default_factory=loopback_listen)
    token: str | None = field(default=None, repr=False)
    shows_token: bool = False
    insecure: bool = False
    advertise: str | None = None
    tls: ServerTls | None = None
    proves_token: bool = False
    tls_advice: str = TLS_ADVICE
    open_store: Callable[[], Store] = MemoryStore
    services: Sequence[Service] = ()
    web_listen: str | None = None
    web_token: str | None = field(default=None, repr=False)
    web_tls: bool = False
    limits: Limits = field(default_factory=Limits)
    deadlock: DeadlockTimes = USUAL_TIMES
    told_level: int = logging.WARNING
    keep_token_s: float = KEEP_TOKEN_S

    def __post_init__(self) -> None:
        if self.web_tls and self.tls is None:
            sentence = "web_tls=True shows the pages with the coordinator's certificate, and it has none: give tls=."
            raise ValueError(coded(SettingCode.MISSING_SETTING, sentence))
        if self.proves_token and (self.tls is None or self.token is None):
            sentence = "proves_token=True proves a token over a connection of TLS: give token= and tls=."
            raise ValueError(coded(SettingCode.MISSING_SETTING, sentence))
