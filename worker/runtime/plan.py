"""What a process asks for and how it will reach its peers, as values that follow from what they are made of.

From the settings, this host and what it offers follows the request to join; from the settings and the world follows the
transport, the same on all ranks. Nothing here opens anything or waits; formation.py does what the plans say.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from horovod.base.errors import SettingCode, WorldCode, code_of, coded, without_code
from horovod.base.protocol import PROTOCOL_VERSION, __version__
from horovod.base.setting import MAX_SIZE
from horovod.base.settings import ROWS, SETTINGS, Settings
from horovod.worker.runtime.devices import GPU_OPERATION_NAMES
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.offers import choose_hierarchy
from horovod.worker.runtime.process_sets import problem_of
from horovod.worker.runtime.world import Endpoint, World

if TYPE_CHECKING:
    from horovod.protos.v1 import membership_pb2

log = logging.getLogger(__name__)


# -- the settings ------------------------------------------------------------------------------------------------------
def usable(settings: Settings, process_sets: Sequence[Sequence[int]]) -> Settings:
    """The settings by which a world is formed; StartError where they, or the sets to begin with, are not usable."""
    _check(settings)
    _tell_of_no_mpi(settings)
    if settings.cpu_operations in ROWS["cpu_operations"].idle_choices or without_gloo(settings):
        settings = dataclasses.replace(settings, cpu_operations="native")
    if settings.cpu_operations == "gloo":
        settings = _over_tcp(settings)
    if settings.min_size is not None and settings.hung_seconds:
        # Peers notice a silent host; whether the world goes on without it is for the coordinator to say.
        soon = min(settings.unreachable_timeout_seconds, settings.hung_seconds)
        settings = dataclasses.replace(settings, unreachable_timeout_seconds=soon)
    size = most_members(settings)
    if problem := problem_of(process_sets, size, [range(size)]):
        raise StartError(problem)
    return settings


def most_members(settings: Settings) -> int:
    """How many members the world may have at most."""
    if settings.min_size is None:
        return settings.size or 1
    return MAX_SIZE if settings.max_size is None else settings.max_size


def _check_elastic(settings: Settings) -> None:
    fewest, size, most = settings.min_size, settings.size, settings.max_size
    if fewest is None:
        if most is not None:
            raise StartError(
                f"HOROVOD_MAX_SIZE={most} is given without HOROVOD_MIN_SIZE, the fewest processes that a world of the "
                "elastic job may have. Set both, or neither."
            )
        return
    if most is not None and most < fewest:
        raise StartError(f"HOROVOD_MAX_SIZE={most} is less than HOROVOD_MIN_SIZE={fewest}.")
    if size is not None and not fewest <= size <= most_members(settings):
        limit = f"HOROVOD_MIN_SIZE={fewest}" if size < fewest else f"HOROVOD_MAX_SIZE={most}"
        raise StartError(
            f"HOROVOD_SIZE={size}, the number of processes for which the first world waits, is "
            f"{'less' if size < fewest else 'more'} than {limit}."
        )
    if settings.coordinator is None:
        raise StartError(
            f"HOROVOD_MIN_SIZE={fewest} makes the job elastic, but no coordinator is given, without which no other "
            "process can come. Start the program with horovodrun, or start horovod-coordinator and give its address to "
            'hvd.init("host:port") or in HOROVOD_COORDINATOR.'
        )


def _check(settings: Settings) -> None:
    """Refuses settings that are right one by one but not together."""
    size, rank = settings.size, settings.rank
    _check_elastic(settings)
    if settings.coordinator is None and ((size or 1) > 1 or (rank or 0) > 0):
        wanted = f"HOROVOD_SIZE={size}" if (size or 1) > 1 else f"HOROVOD_RANK={rank}"
        raise StartError(
            coded(
                SettingCode.MISSING_SETTING,
                f"{wanted}, but no coordinator is given. Start the program with horovodrun, or start "
                'horovod-coordinator and give its address to hvd.init("host:port") or in HOROVOD_COORDINATOR.',
            )
        )
    if settings.coordinator is not None and size is None and settings.min_size is None:
        raise StartError(
            coded(
                SettingCode.MISSING_SETTING,
                f"The coordinator {settings.coordinator} is given, but not how many processes form the world. Set "
                "HOROVOD_SIZE or call hvd.init(..., size=n).",
            )
        )
    if rank is not None and rank >= (size or 1) and settings.min_size is None:
        sentence = f"HOROVOD_RANK={rank} is not a rank of a world of HOROVOD_SIZE={size or 1} processes."
        raise StartError(coded(SettingCode.CONFLICTING_SETTINGS, sentence))


def _tell_of_no_mpi(settings: Settings) -> None:
    """Scripts for earlier versions ask for GPU tensors by MPI; what they get does the same without it."""
    if "mpi" in (settings.gpu_operations, *(getattr(settings, f"gpu_{name}") for name in GPU_OPERATION_NAMES)):
        log.info(
            "HOROVOD_GPU_OPERATIONS or one like it asks for MPI, which this version of Horovod does not use: such GPU "
            "tensors go through the host's memory and by what HOROVOD_CPU_OPERATIONS says (%s).",
            settings.cpu_operations,
        )


def without_gloo(settings: Settings) -> str:
    """Why the collectives are our own though the settings ask for Gloo's; "" where they don't, or get them.

    An image, or a script for earlier versions, may set the variable where no libgloo is: results are the same.
    """
    if settings.cpu_operations != "gloo":
        return ""
    from horovod._core import gloo_obstacle

    if not (obstacle := gloo_obstacle()):
        return ""
    why = f"HOROVOD_CPU_OPERATIONS=gloo has no effect: {without_code(obstacle)} Horovod uses its own algorithms."
    return coded(code_of(obstacle) or SettingCode.UNSUPPORTED, why)


def _over_tcp(settings: Settings) -> Settings:
    """Gloo's algorithms run over our TCP connections."""
    if settings.transport == "shm":
        raise StartError(
            coded(
                SettingCode.CONFLICTING_SETTINGS,
                "HOROVOD_CPU_OPERATIONS=gloo works over TCP, but HOROVOD_TRANSPORT=shm asks for shared memory. Leave "
                "one of them out.",
            )
        )
    return dataclasses.replace(settings, transport="tcp")


# -- the request to join -----------------------------------------------------------------------------------------------
def request_to_join(
    settings: Settings,
    process_sets: Sequence[Sequence[int]],
    host: membership_pb2.HostIdentity,
    endpoints: Sequence[Endpoint],
    segment_address: str,
) -> membership_pb2.JoinRequest:
    """What a request says of the job, this host and what is offered; who the process is comes with each attempt."""
    from horovod.protos.v1 import membership_pb2, types_pb2
    from horovod.worker.runtime.witness import own_age_seconds

    options = {row.name: str(getattr(settings, row.name)) for row in SETTINGS if row.agreed}
    options["process_sets"] = _in_short([list(ranks) for ranks in process_sets])
    return membership_pb2.JoinRequest(
        protocol_version=PROTOCOL_VERSION,
        version=__version__,
        job=settings.job,
        size=settings.size or 0,
        host=host,
        requested_rank=settings.rank,
        incarnation=settings.incarnation,
        endpoints=[types_pb2.Endpoint(address=e.address, port=e.port, interface=e.interface) for e in endpoints],
        segment_address=segment_address,
        options=options,
        sizes=_sizes(settings),
        settle_seconds=settings.settle_seconds if settings.min_size is not None else 0.0,
        started_seconds=own_age_seconds() if settings.min_size is not None else 0.0,
        begins_anew=settings.begin_anew if settings.min_size is not None else False,
        patience_seconds=settings.elastic_timeout_seconds if settings.min_size is not None else 0.0,
    )


def _sizes(settings: Settings) -> membership_pb2.Sizes | None:
    from horovod.protos.v1 import membership_pb2

    if settings.min_size is None:
        return None
    return membership_pb2.Sizes(fewest=settings.min_size, most=most_members(settings))


def _in_short(process_sets: list[list[int]]) -> str:
    """A text that is equal on two ranks if the sets are."""
    text = str(process_sets)
    return text if len(text) <= 200 else f"{text[:150]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


# -- the transport -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Transport:
    """Between which ranks tensors go through shared memory, and between which over TCP."""

    rank: int
    size: int
    is_shared: bool  # all ranks share memory
    # Rank -> the host whose memory it shares; empty if all ranks of the world share it, or none do.
    hosts: Sequence[int]

    @property
    def sharing(self) -> int:
        """With how many other ranks this one shares memory."""
        return (self.size if self.is_shared else self.hosts.count(self.hosts[self.rank]) if self.hosts else 1) - 1

    @property
    def connects(self) -> bool:
        """Whether TCP is needed."""
        return self.size > 1 and not self.is_shared

    @property
    def name(self) -> str:
        """ "none" in a world of one, "shm", "tcp", or "tcp+shm" where hosts share memory."""
        if self.size == 1:
            return "none"
        return "shm" if self.is_shared else "tcp+shm" if self.hosts else "tcp"


def choose_transport(settings: Settings, world: World) -> Transport:
    """All ranks choose the same. StartError where the settings ask for what the world does not allow."""
    shared = False
    if world.size > 1 and settings.transport != "tcp":
        obstacle = world.why_not_shared_memory()
        if obstacle is not None and settings.transport == "shm":
            sentence = f"HOROVOD_TRANSPORT=shm is not possible: {obstacle}. Use HOROVOD_TRANSPORT=auto or tcp."
            raise StartError(coded(WorldCode.NO_SHARED_MEMORY, sentence))
        shared = obstacle is None
    return Transport(world.rank, world.size, shared, [] if shared else choose_hierarchy(settings, world))
