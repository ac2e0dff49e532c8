"""The parts of a coordinator, each made of its configuration and of parts before it; server.py opens them in order."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from horovod.base.errors import AccessCode, coded
from horovod.base.proofs import MIN_CLUSTER_TOKEN_LENGTH, job_token
from horovod.base.protocol import MAX_WORLD_MESSAGE_BYTES, __version__
from horovod.base.tokens import MAX_TOKEN_LENGTH, is_token
from horovod.coordinator.services.elsewhere import Attendances
from horovod.protos.v1 import agents_pb2, jobs_pb2, membership_pb2, negotiation_pb2

from .address import ListenAddress
from .config import CoordinatorConfig
from .metrics import MeasuredStore
from .pages import Readiness
from .services.agents import AgentsService
from .services.auth import Access
from .services.calls import add_service_to_server
from .services.cluster import ClusterHub
from .services.health import add_health_to_server
from .services.hub import Hub
from .services.jobs import JobsService
from .services.membership import MembershipService
from .services.negotiation_service import NegotiationService
from .services.peers import Peers
from .services.sending import Sending
from .store import Store

MAX_REQUEST_BYTES = 8 << 20
# Streams of one connection; a rank has two, and an agent's relay one connection for all of its ranks.
MAX_STREAMS = 2048
UNREAD_BYTES = 1 << 10  # window of a call that is not read; a call that is read gets the window that its message needs
MAX_PENDING = 2048  # calls that wait to be served; some of those beyond are refused, and come back a moment later
HANDSHAKE_MS = 10_000  # milliseconds for TLS and the beginning of HTTP/2

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else two coordinators on one port would each get some of the members
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_WORLD_MESSAGE_BYTES),
    # Members ping every few seconds. By default a server ends the connection of a client that pings that often while
    # nothing else is sent.
    ("grpc.http2.min_ping_interval_without_data_ms", 10),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10),
    ("grpc.http2.max_ping_strikes", 0),
    # An expanded message may have a thousand times the bytes that came, and gRPC before the fix of its issue 41996
    # expands it before it looks whether it is too large. Our clients compress nothing, and what others compress is
    # refused as any bytes that are no message. (Where the algorithms are disabled, each is a line on stderr.)
    ("grpc.per_message_decompression", 0),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    # What a call sends before it is served stays in memory. So windows do not grow by themselves, and few calls wait.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", UNREAD_BYTES),
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING * 3 // 2),
)


def check_token(token: str | None) -> None:
    if token is not None and not is_token(token):
        sentence = (
            "The token for a coordinator is not usable: expected one line of ASCII text without spaces, "
            f"{MAX_TOKEN_LENGTH} characters at most."
        )
        raise ValueError(coded(AccessCode.UNUSABLE_TOKEN, sentence))


def make_peers(config: CoordinatorConfig, address: ListenAddress, is_shared: bool) -> Peers:
    """is_shared: other coordinators may use the store. ValueError when they could not know this one over TLS."""
    if config.tls is None or not is_shared:
        return Peers(config.token)
    config.tls.check_between(ListenAddress.parse(config.advertise).host if config.advertise else address.host)
    return Peers(config.token, config.tls)


def make_server(config: CoordinatorConfig, access: Access) -> grpc.aio.Server:
    # A process that died is noticed at once: its connection is reset, and its pidfd tells on this host. Keepalive
    # is for hosts that vanish. A member that misses it is only away (services/sights.py, core/world/life.py): where
    # its process is seen to live, stopped or not, it is not lost.
    options = (*_OPTIONS, *config.limits.channel_options())
    return grpc.aio.server(interceptors=access.interceptors(), options=options)


def make_hubs(config: CoordinatorConfig, store: Store, peers: Peers) -> tuple[Store, Hub, ClusterHub]:
    """The store as the two use it, which know of each other."""

    def observe(seconds: float, operation: str, result: str) -> None:
        hub.metrics.store_seconds.observe(seconds, operation, result)

    def agent_s(job: str, rank: int) -> float:
        return cluster.agent_s(job, rank)

    def host_goes(job: str, slot: int, incarnation: int) -> bool:
        return cluster.host_goes(job, slot, incarnation)

    def work_done(job: str, slots: Mapping[int, int]) -> None:
        cluster.work_done(job, slots)

    measured = MeasuredStore(store, observe)
    hub = Hub(
        measured,
        limits=config.limits,
        deadlock=config.deadlock,
        told_level=config.told_level,
        peers=peers,
        agent_s=agent_s,
        work_done=work_done,
        host_goes=host_goes,
    )
    cluster = ClusterHub(
        measured,
        __version__,
        limits=config.limits,
        token=lambda job: _token_for(config.token, job),
        rank_ended=hub.rank_ended,
        ranks_seen=hub.ranks_seen,
        coming=hub.coming,
        attendance=Attendances(measured, hub, peers).of,
        latest_epoch=hub.latest_epoch,
        peers=peers,
    )
    return measured, hub, cluster


def add_services(
    server: grpc.aio.Server,
    config: CoordinatorConfig,
    access: Access,
    hub: Hub,
    cluster: ClusterHub,
    ready: Readiness,
) -> None:
    sending = Sending()
    for contract, name, servicer, of_one in (
        (membership_pb2, "Membership", MembershipService(hub, access, sending), None),
        (negotiation_pb2, "Negotiation", NegotiationService(hub, access, sending), None),
        (agents_pb2, "Agents", AgentsService(cluster, access, sending), cluster),
        (jobs_pb2, "Jobs", JobsService(cluster, access, sending), cluster),
    ):
        add_service_to_server(server, contract.DESCRIPTOR, name, servicer, access, of_one)
    add_health_to_server(ready, server, access.strangers)
    server.add_generic_rpc_handlers(tuple(one.handler(access) for one in config.services))


def _token_for(token: str | None, job: str) -> str:
    """With what the ranks of a job join: its own token, unless the cluster's is too short to make one of."""
    if token is None or len(token) < MIN_CLUSTER_TOKEN_LENGTH:
        return token or ""
    return job_token(token, job)
