"""How a process gets from its settings to a running engine in a world, step by step.

Offer a shared-memory segment and TCP listeners, join with their addresses, wait for the world, choose the transport,
connect, start the engine, start to negotiate. What is asked for and chosen stands in plan.py. When a step fails, what
the ones before it made is closed again in reverse order. epoch.py says when this happens, and what ends it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from horovod.base.errors import WorldCode, coded
from horovod.base.settings import Settings
from horovod.base.telemetry import tracing
from horovod.base.words import capitalized
from horovod.worker.runtime.devices import background_cpu, cuda_file, nccl_file, nvrtc_file
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.offers import engine_options, make_offers
from horovod.worker.runtime.plan import Transport, choose_transport, request_to_join
from horovod.worker.runtime.process_sets import ProcessSets
from horovod.worker.runtime.timeline import Timeline
from horovod.worker.runtime.world import OnWorldChange, World

if TYPE_CHECKING:
    from horovod._core import Engine, Segment
    from horovod.protos.v1 import membership_pb2
    from horovod.worker.runtime.local_member import LocalMember
    from horovod.worker.runtime.mesh import Listeners
    from horovod.worker.runtime.negotiator import Negotiator
    from horovod.worker.runtime.past_world import LastWorld
    from horovod.worker.runtime.session import Session

log = logging.getLogger(__name__)

# How often a start that waits for peers looks whether the world still stands.
CHECK_SECONDS = 0.05

# How long the coordinator has to tell of a member whose end this process has noticed by itself, as its memory is gone.
NEWS_SECONDS = 10.0


@dataclass(eq=False, repr=False)  # settings have secrets
class Context:
    """A member of a running world: all that one hvd.init() made. Nothing in it is global; a test makes several.

    transport: "none" in a world of one, "shm", "tcp", or "tcp+shm" where hosts share memory.
    socket_inodes: of the data plane; a forked child closes them.
    when_closed: lets go of what holds this or its engine.
    """

    settings: Settings
    world: World
    engine: Engine
    session: Session | None = None
    negotiator: Negotiator | None = None
    transport: str = "none"
    socket_inodes: frozenset[int] = frozenset()
    process_sets: ProcessSets = field(init=False)
    timeline: Timeline = field(init=False)
    when_closed: list[Callable[[], None]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.process_sets = ProcessSets(self.settings, self.world, self.engine, self.negotiator)
        self.timeline = Timeline(self.settings, self.engine, self.world.rank)

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on in another world when members of this one come or go."""
        return self.session is not None and self.session.member.is_elastic

    def counters(self) -> dict[str, int]:
        """Monotonic counts of the engine and of the messages sent to the coordinator."""
        sent = self.negotiator.counters() if self.negotiator else {"messages_sent": 0, "operations_announced": 0}
        return {**self.engine.counters(), **sent}


def form_alone(settings: Settings) -> Context:
    """A world of one, which needs no coordinator."""
    world = World.of_one(settings.job, _host(settings), os.getpid())
    return Context(settings, world, _engine(settings, world))


def form(
    settings: Settings,
    process_sets: Sequence[Sequence[int]],
    deadline: float,
    last: LastWorld | None,
    on_change: OnWorldChange,
) -> Context:
    """Joins a world and connects to all of it. StartError where that fails or is not done by `deadline`. An elastic job
    may take longer to have a world that this process can join (Session.join), and has the start timeout to connect.

    WorldNeverStoodError where the world is none any more and another one can be joined.
    """
    # gRPC and protobuf are imported only by processes that have a coordinator.
    from horovod.protos.v1 import membership_pb2
    from horovod.worker.runtime.departures import NOT_CONNECTED
    from horovod.worker.runtime.host import shared_memory_domain
    from horovod.worker.runtime.stopped_peers import StoppedPeers
    from horovod.worker.runtime.token import given_token

    with contextlib.ExitStack() as made:
        token = given_token(settings)
        segment, listeners = make_offers(settings)
        if listeners is not None:
            made.callback(listeners.close)
        session = _session(settings, token, on_change)
        # Of an elastic job, all whose connections failed join again: the next world is not to form without them.
        leave = session.close if last is None else functools.partial(last.leave, session)
        made.callback(leave, NOT_CONNECTED, returns=settings.min_size is not None)
        endpoints = listeners.endpoints if listeners else []
        host = membership_pb2.HostIdentity(name=_host(settings), shared_memory_domain=shared_memory_domain())
        request = request_to_join(settings, process_sets, host, endpoints, segment.address if segment else "")
        world = _join(session, settings, request, deadline, last)
        stopped_peers = None
        if settings.min_size is not None:
            deadline = time.monotonic() + settings.start_timeout_seconds
            if settings.hung_seconds:
                stopped_peers = StoppedPeers(world, settings.hung_seconds, session.member.report_stopped)
                made.callback(stopped_peers.close)
                stopped_peers.start()
        transport = choose_transport(settings, world)
        if not transport.sharing:
            segment = None
        sockets, wire_keys = _connect(settings, world, transport, listeners, session.member, deadline, last)
        if listeners is not None:
            listeners.close()
        inodes = frozenset(os.fstat(fd).st_ino for fds in sockets.values() for fd in fds)
        try:
            engine = _engine(settings, world, segment, sockets, wire_keys, transport.hosts)
        except Exception as error:
            # The goodbye of a member explains the failure, and the member may be replaced.
            session.member.check(NEWS_SECONDS)
            raise StartError(str(error)) from error
        made.callback(engine.close)
        if segment is not None:
            _await_peers(segment, transport.sharing, world, session.member, deadline)
        session.member.attach(engine)
        negotiator = _negotiate(settings, world, session, engine) if world.size > 1 else None
        me, name = capitalized(world.label(world.rank)), transport.name
        log.info("%s is in world %d of %d ranks over %s.", me, world.epoch, world.size, name)
        context = Context(settings, world, engine, session, negotiator, name, inodes)
        if stopped_peers is not None:
            context.when_closed.append(stopped_peers.close)
        made.pop_all()
        return context


def _host(settings: Settings) -> str:
    return settings.hostname or socket.gethostname()


def _session(settings: Settings, token: str | None, on_change: OnWorldChange) -> Session:
    from horovod.worker.runtime.session import Session
    from horovod.worker.runtime.tls import ClientTls

    assert settings.coordinator is not None
    return Session(
        settings.coordinator,
        token,
        tls=ClientTls.of(settings),
        keepalive_timeout_seconds=settings.keepalive_timeout_seconds,
        reattach_grace_seconds=settings.reattach_grace_seconds,
        relay=(settings.relay and settings.relay_socket) or "",
        on_change=on_change,
    )


def _join(
    session: Session,
    settings: Settings,
    request: membership_pb2.JoinRequest,
    deadline: float,
    last: LastWorld | None,
) -> World:
    """The world, which is remembered from now on as the last one, also when the start fails later."""
    from horovod.protos.v1 import membership_pb2
    from horovod.worker.runtime.witness import own_identity

    coordinator = settings.coordinator
    assert coordinator is not None

    def attempt() -> membership_pb2.JoinRequest:
        member_id = secrets.token_urlsafe(12)  # short: a world has one of each member
        proof = last.rejoin(coordinator, settings.job, member_id) if last else None
        pid, process = os.getpid(), own_identity()
        made = membership_pb2.JoinRequest(member_id=member_id, pid=pid, process=process, rejoin=proof)
        made.MergeFrom(request)
        if settings.min_size is not None and last is not None and last.is_of(coordinator, settings.job):
            made.commits, made.state_epoch = last.commits, last.state_epoch
        return made

    with tracing.span("horovod.join", job=settings.job) as joining:
        world = session.join(attempt, deadline)
        joining.set(epoch=world.epoch, rank=world.rank, size=world.size)
    if last is not None:
        last.remember(coordinator, world)
    return world


def _connect(
    settings: Settings,
    world: World,
    transport: Transport,
    listeners: Listeners | None,
    member: LocalMember,
    deadline: float,
    last: LastWorld | None,
) -> tuple[dict[int, list[int]], dict[int, bytes]]:
    """The sockets to each peer, and the keys of each socket; none where no TCP is needed."""
    if not transport.connects:
        return {}, {}
    from horovod._core import partners
    from horovod.worker.runtime.mesh import connect_peers

    wire_keys: dict[int, bytes] = {}
    with tracing.span("horovod.connect", rank=world.rank):
        if listeners is None:
            why = capitalized(world.why_not_shared_memory() or "HOROVOD_TRANSPORT=tcp is set")
            sentence = f"{why}, so TCP is needed, but {world.label(world.rank)} has no network interface to listen on."
            raise StartError(coded(WorldCode.NO_INTERFACE, sentence))
        hosts, placement, options = transport.hosts, world.placement(), engine_options(settings)
        sockets = connect_peers(
            world,
            listeners,
            connections=settings.connections_per_peer,
            deadline=deadline,
            partners=partners(world.rank, world.size, hosts=hosts, placement=placement, options=options),
            check=member.check,
            wire_keys=wire_keys,
            kept=last.links.take(world) if last is not None else None,
            unreachable_seconds=settings.unreachable_timeout_seconds or math.inf,
            tell_unreachable=member.report_unconnected,
        )
    return sockets, wire_keys


def _engine(
    settings: Settings,
    world: World,
    segment: Segment | None = None,
    sockets: dict[int, list[int]] | None = None,
    wire_keys: dict[int, bytes] | None = None,
    hosts: Sequence[int] = (),
) -> Engine:
    from horovod._core import Engine

    return Engine(
        rank=world.rank,
        size=world.size,
        epoch=world.epoch,
        labels=[world.label(rank) for rank in range(world.size)],
        segment=segment,
        segment_addresses=[m.segment_address for m in world.members] if segment else (),
        sockets=sockets or {},
        wire_keys=wire_keys or {},
        hosts=hosts,
        placement=world.placement(),
        options={
            **engine_options(settings),
            "background_cpu": background_cpu(settings.thread_affinity, world.local_rank, world.local_size),
        },
        cuda_file=cuda_file(settings),
        nccl_file=nccl_file(settings),
        nvrtc_file=nvrtc_file(settings),
    )


def _await_peers(segment: Segment, peers: int, world: World, member: LocalMember, deadline: float) -> None:
    """Until that many have opened this rank's segment: it may leave at once, and with it the segment."""
    while (attached := segment.await_attached(peers, CHECK_SECONDS)) < peers:
        member.check()
        if time.monotonic() > deadline:
            raise StartError(
                coded(
                    WorldCode.UNREACHABLE_PEER,
                    f"{peers - attached} of {peers} other ranks did not open the shared memory of "
                    f"{world.label(world.rank)} in time. Give them more with HOROVOD_START_TIMEOUT, or set "
                    "HOROVOD_TRANSPORT=tcp.",
                )
            )


def _negotiate(settings: Settings, world: World, session: Session, engine: Engine) -> Negotiator:
    from horovod.protos.v1 import negotiation_pb2
    from horovod.worker.runtime.negotiator import REPORTS_PER_S, Negotiator
    from horovod.worker.runtime.timeline import FirstStep

    member = session.member
    negotiator = Negotiator(
        member,
        session.streams.grpc_threads,
        engine,
        hello=negotiation_pb2.Hello(job=world.job, member_id=world.me.member_id, rank=world.rank),
        epoch=world.epoch,
        report_lost=member.report_lost,
        grace_seconds=settings.reattach_grace_seconds,
        first_step=FirstStep(tracing.current(), world.rank) if tracing.is_active() else None,
        report_seconds=settings.report_seconds and max(settings.report_seconds, world.size / REPORTS_PER_S),
    )
    negotiator.start()
    return negotiator
