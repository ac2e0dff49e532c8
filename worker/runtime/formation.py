"""How a process gets from its settings to a running engine, step by step, and back again.

Make a shared-memory segment and TCP listeners, join with their addresses, wait for the world, choose the transport (all
ranks choose the same from the same world), connect, start the engine, start to negotiate. When a step fails, what the
ones before it made is closed again in reverse order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from horovod.telemetry import tracing
from horovod.worker.runtime.affinity import background_cpu
from horovod.worker.runtime.errors import MemberLostError, StartError, WorldNeverStoodError
from horovod.worker.runtime.gpu import GPU_OPERATION_NAMES, cuda_file, nccl_file, nvrtc_file
from horovod.worker.runtime.offers import choose_hierarchy, engine_options, make_listeners, make_segment
from horovod.worker.runtime.process_sets import ProcessSets, problem_of
from horovod.worker.runtime.timeline import Timeline
from horovod.worker.runtime.world import Endpoint, World
from horovod.worker.settings import SETTINGS, Settings

if TYPE_CHECKING:
    from horovod._core import Engine, Segment
    from horovod.worker.runtime.mesh import Listeners
    from horovod.worker.runtime.negotiation import Negotiator
    from horovod.worker.runtime.proofs import Memory
    from horovod.worker.runtime.session import Session

log = logging.getLogger(__name__)

# How often a start that waits for peers looks whether the world still stands.
CHECK_SECONDS = 0.05

# How long the coordinator has to tell of a member whose end this process has noticed by itself, as its memory is gone.
NEWS_SECONDS = 10.0


class Context:
    """A member of a running world: all that one hvd.init() made. Nothing in it is global; a test makes several."""

    def __init__(
        self,
        settings: Settings,
        world: World,
        engine: Engine,
        session: Session | None = None,
        negotiator: Negotiator | None = None,
        transport: str = "none",
    ) -> None:
        self.settings = settings
        self.world = world
        self.engine = engine
        self.session = session
        self.negotiator = negotiator
        self.process_sets = ProcessSets(settings, world, engine, negotiator)
        self.timeline = Timeline(settings, engine, world.rank)
        self.transport = transport  # "none" in a world of one, "shm", "tcp", or "tcp+shm" where hosts share memory
        self.socket_inodes: frozenset[int] = frozenset()  # of the data plane; a forked child closes them

    def counters(self) -> dict[str, int]:
        """Monotonic counts of the engine and of the messages sent to the coordinator."""
        sent = self.negotiator.counters() if self.negotiator else {"messages_sent": 0, "operations_announced": 0}
        return {**self.engine.counters(), **sent}

    def close(self, reason: str = "") -> None:
        """Leaves the world in order. Idempotent."""
        if self.session is not None and (lost := self.engine.lost_peer()):
            self.session.report_lost(*lost)  # before the goodbye, in case the negotiator has not come to it
        sentence = f"{self.world.label(self.world.rank)} left the world{': ' + reason if reason else ''}."
        if problem := self.engine.close(sentence[0].upper() + sentence[1:]):
            log.warning("%s", problem)
        self.timeline.stop()  # now that the last operations have ended
        if self.negotiator is not None:
            self.negotiator.close()
        if self.session is not None:
            self.session.close(reason)


def form(settings: Settings, process_sets: Sequence[Sequence[int]] = (), memory: Memory | None = None) -> Context:
    """Blocks until the world stands and this process is connected to all of it; StartError or ValueError otherwise.

    process_sets: ranks of the sets to begin with, equal on all ranks; their ids are 1, 2 and so on. memory: of the
    world that this process was in before, so that it can prove who it was; keeps the new one, also when the start fails
    later.
    """
    _check(settings)
    _tell_of_no_mpi(settings)
    if settings.cpu_operations == "gloo":
        settings = _with_gloo(settings)
    size = settings.size or 1
    if problem := problem_of(process_sets, size, [range(size)]):
        raise StartError(problem)
    context = _form(settings, process_sets, memory)
    try:
        context.timeline.start_as_set()
    except StartError:
        context.close("its timeline can't be written")
        raise
    if process_sets:
        try:
            context.process_sets.add(process_sets)
        except BaseException as error:
            context.close("its process sets could not be formed")
            if isinstance(error, RuntimeError):
                raise MemberLostError(str(error)) from error
            raise
    return context


def _form(settings: Settings, process_sets: Sequence[Sequence[int]], memory: Memory | None) -> Context:
    host = settings.hostname or socket.gethostname()
    if settings.coordinator is None:
        world = World.of_one(settings.job, host, os.getpid())
        return Context(settings, world, _engine(settings, world, timeout_seconds=settings.start_timeout_seconds))
    deadline = time.monotonic() + settings.start_timeout_seconds
    while True:
        with contextlib.ExitStack() as made:
            try:
                context = _join(settings, process_sets, host, deadline, made, memory)
            except WorldNeverStoodError as error:
                log.info("%s This process joins again.", error)
                continue
            made.pop_all()
        return context


def _check(settings: Settings) -> None:
    """Refuses settings that are right one by one but not together."""
    size, rank = settings.size, settings.rank
    if settings.coordinator is None and ((size or 1) > 1 or (rank or 0) > 0):
        wanted = f"HOROVOD_SIZE={size}" if (size or 1) > 1 else f"HOROVOD_RANK={rank}"
        raise StartError(
            f"{wanted}, but no coordinator is given. Start the program with horovodrun, or start horovod-coordinator "
            'and give its address to hvd.init("host:port") or in HOROVOD_COORDINATOR.'
        )
    if settings.coordinator is not None and size is None:
        raise StartError(
            f"The coordinator {settings.coordinator} is given, but not how many processes form the world. Set "
            "HOROVOD_SIZE or call hvd.init(..., size=n)."
        )
    if rank is not None and rank >= (size or 1):
        raise StartError(f"HOROVOD_RANK={rank} is not a rank of a world of HOROVOD_SIZE={size or 1} processes.")
    if settings.cpu_operations in ("mpi", "ccl"):
        library = {"mpi": "MPI", "ccl": "oneCCL"}[settings.cpu_operations]
        raise StartError(
            f"HOROVOD_CPU_OPERATIONS={settings.cpu_operations} is not possible: this version of Horovod can't use "
            f"{library}. Use native (the default, which needs nothing) or gloo."
        )


def _tell_of_no_mpi(settings: Settings) -> None:
    """Scripts for earlier versions ask for GPU tensors by MPI; what they get does the same without it."""
    if "mpi" in (settings.gpu_operations, *(getattr(settings, f"gpu_{name}") for name in GPU_OPERATION_NAMES)):
        log.info(
            "HOROVOD_GPU_OPERATIONS or one like it asks for MPI, which this version of Horovod does not use: such GPU "
            "tensors go through the host's memory and by what HOROVOD_CPU_OPERATIONS says (%s).",
            settings.cpu_operations,
        )


def _with_gloo(settings: Settings) -> Settings:
    """Gloo's algorithms run over our TCP connections; StartError where there is no Gloo."""
    from horovod._core import gloo_obstacle

    if obstacle := gloo_obstacle():
        raise StartError(
            f"HOROVOD_CPU_OPERATIONS=gloo is not possible: {obstacle} Without HOROVOD_CPU_OPERATIONS Horovod uses its "
            "own algorithms, which need nothing."
        )
    if settings.transport == "shm":
        raise StartError(
            "HOROVOD_CPU_OPERATIONS=gloo works over TCP, but HOROVOD_TRANSPORT=shm asks for shared memory. Leave one "
            "of them out."
        )
    return dataclasses.replace(settings, transport="tcp")


def _join(
    settings: Settings,
    process_sets: Sequence[Sequence[int]],
    host: str,
    deadline: float,
    made: contextlib.ExitStack,
    memory: Memory | None,
) -> Context:
    # gRPC and protobuf are imported only by processes that have a coordinator.
    from horovod.protos.v1 import membership_pb2, negotiation_pb2, types_pb2
    from horovod.worker.runtime.first_step import FirstStep
    from horovod.worker.runtime.host import shared_memory_domain
    from horovod.worker.runtime.negotiation import REPORTS_PER_S, Negotiator
    from horovod.worker.runtime.proofs import PastWorld
    from horovod.worker.runtime.session import NOT_CONNECTED, PROTOCOL_VERSION, Session
    from horovod.worker.runtime.tls import ClientTls
    from horovod.worker.runtime.token import given_token
    from horovod.worker.runtime.witness import own_identity

    assert settings.coordinator is not None
    token = given_token(settings)
    alone = settings.size == 1
    segment = None if alone or settings.transport == "tcp" else make_segment(settings)
    listeners = None if alone or settings.transport == "shm" else make_listeners(settings, optional=segment is not None)
    if listeners is not None:
        made.callback(listeners.close)
    endpoints: list[Endpoint] = listeners.endpoints if listeners else []
    options = {row.name: str(getattr(settings, row.name)) for row in SETTINGS if row.agreed}
    options["process_sets"] = _in_short([list(ranks) for ranks in process_sets])

    coordinator = settings.coordinator

    def request() -> membership_pb2.JoinRequest:
        member_id = secrets.token_urlsafe(12)  # short: a world has one of each member
        return membership_pb2.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            job=settings.job,
            member_id=member_id,
            size=settings.size or 0,
            host=membership_pb2.HostIdentity(name=host, shared_memory_domain=shared_memory_domain()),
            requested_rank=settings.rank,
            pid=os.getpid(),
            endpoints=[types_pb2.Endpoint(address=e.address, port=e.port, interface=e.interface) for e in endpoints],
            segment_address=segment.address if segment else "",
            options=options,
            process=own_identity(),
            rejoin=memory.rejoin(coordinator, settings.job, member_id) if memory else None,
        )

    session = Session(
        coordinator,
        token,
        tls=ClientTls.of(settings),
        keepalive_timeout_seconds=settings.keepalive_timeout_seconds,
        reattach_grace_seconds=settings.reattach_grace_seconds,
        relay=(settings.relay and settings.relay_socket) or "",
    )
    made.callback(session.close, NOT_CONNECTED)
    with tracing.span("horovod.join", job=settings.job) as joining:
        world = session.join(request, deadline)
        joining.set(epoch=world.epoch, rank=world.rank, size=world.size)
    if memory is not None:
        memory.last = PastWorld(coordinator, world.job, world.epoch, world.rank, world.secret)
    shared = _choose_shared_memory(settings, world)
    hosts = [] if shared else choose_hierarchy(settings, world)
    sockets: dict[int, list[int]] | None = None
    wire_keys: dict[int, bytes] = {}
    if not shared:
        if hosts.count(hosts[world.rank] if hosts else -1) < 2:
            segment = None
        if world.size > 1:
            with tracing.span("horovod.connect", rank=world.rank):
                sockets = _connect(settings, world, hosts, listeners, session, deadline, wire_keys)
    if listeners is not None:
        listeners.close()
    inodes = frozenset(os.fstat(fd).st_ino for fds in (sockets or {}).values() for fd in fds)
    left = max(0.001, deadline - time.monotonic())
    try:
        engine = _engine(
            settings, world, segment=segment, sockets=sockets, wire_keys=wire_keys, hosts=hosts, timeout_seconds=left
        )
    except Exception as error:
        session.check(NEWS_SECONDS)  # a member that is gone explains it, and may be replaced
        raise StartError(str(error)) from error
    made.callback(engine.close)
    if segment is not None and world.size > 1:
        peers = (hosts.count(hosts[world.rank]) if hosts else world.size) - 1
        _await_peers(segment, peers, world, session, deadline)
    session.attach(engine)
    negotiator = None
    if world.size > 1:
        negotiator = Negotiator(
            session,
            session.grpc_threads,
            engine,
            hello=negotiation_pb2.Hello(job=world.job, member_id=world.me.member_id, rank=world.rank),
            epoch=world.epoch,
            report_lost=session.report_lost,
            grace_seconds=settings.reattach_grace_seconds,
            first_step=FirstStep(tracing.current(), world.rank) if tracing.is_active() else None,
            report_seconds=settings.report_seconds and max(settings.report_seconds, world.size / REPORTS_PER_S),
        )
        negotiator.start()
    transport = "none" if world.size == 1 else "shm" if shared else "tcp+shm" if hosts else "tcp"
    log.info("%s is in epoch %d of %d ranks over %s.", world.label(world.rank), world.epoch, world.size, transport)
    context = Context(settings, world, engine, session, negotiator, transport)
    context.socket_inodes = inodes
    return context


def _await_peers(segment: Segment, peers: int, world: World, session: Session, deadline: float) -> None:
    """Until that many have opened this rank's segment: it may leave at once, and with it the segment."""
    while (attached := segment.await_attached(peers, CHECK_SECONDS)) < peers:
        session.check()
        if time.monotonic() > deadline:
            raise StartError(
                f"{peers - attached} of {peers} other ranks did not open the shared memory of "
                f"{world.label(world.rank)} in time. Give them more with HOROVOD_START_TIMEOUT, or set "
                "HOROVOD_TRANSPORT=tcp."
            )


def _in_short(process_sets: list[list[int]]) -> str:
    """A text that is equal on two ranks if the sets are."""
    text = str(process_sets)
    return text if len(text) <= 200 else f"{text[:150]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _choose_shared_memory(settings: Settings, world: World) -> bool:
    if world.size == 1 or settings.transport == "tcp":
        return False
    obstacle = world.why_not_shared_memory()
    if obstacle is not None and settings.transport == "shm":
        raise StartError(f"HOROVOD_TRANSPORT=shm is not possible: {obstacle}. Use HOROVOD_TRANSPORT=auto or tcp.")
    return obstacle is None


def _connect(
    settings: Settings,
    world: World,
    hosts: Sequence[int],
    listeners: Listeners | None,
    session: Session,
    deadline: float,
    wire_keys: dict[int, bytes],
) -> dict[int, list[int]]:
    from horovod._core import partners
    from horovod.worker.runtime.mesh import connect_peers

    if listeners is None:
        raise StartError(
            f"{world.why_not_shared_memory()}, so TCP is needed, but {world.label(world.rank)} has no network "
            "interface to listen on."
        )
    return connect_peers(
        world,
        listeners,
        connections=settings.connections_per_peer,
        deadline=deadline,
        partners=partners(
            world.rank, world.size, hosts=hosts, placement=world.placement(), options=engine_options(settings)
        ),
        check=session.check,
        wire_keys=wire_keys,
    )


def _engine(
    settings: Settings,
    world: World,
    *,
    segment: Segment | None = None,
    sockets: dict[int, list[int]] | None = None,
    wire_keys: dict[int, bytes] | None = None,
    hosts: Sequence[int] = (),
    timeout_seconds: float,
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
