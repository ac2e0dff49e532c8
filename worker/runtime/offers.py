"""What a member offers its peers before they are connected, for the world and for each process set: a shared-memory
segment, or TCP listeners. And the engine's options, which say how large they are.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from horovod.base.errors import WorldCode, code_of, coded
from horovod.base.setting import split_address, split_addresses, split_ports
from horovod.base.settings import SETTINGS, WIRE_MODES, Settings
from horovod.worker.runtime.devices import gpu_operations
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.world import World

if TYPE_CHECKING:
    from horovod._core import Segment
    from horovod.worker.runtime.mesh import Listeners

log = logging.getLogger(__name__)


def make_offers(settings: Settings) -> tuple[Segment | None, Listeners | None]:
    """For the world: what the transport may need. The listeners are closed by the caller."""
    if settings.size == 1 and settings.min_size is None:
        return None, None
    segment = None if settings.transport == "tcp" else make_segment(settings)
    return segment, None if settings.transport == "shm" else make_listeners(settings, optional=segment is not None)


def make_segment(settings: Settings) -> Segment | None:
    """This member's segment; None when there can't be one and TCP may be used instead."""
    from horovod._core import Segment

    try:
        return Segment(options=engine_options(settings))
    except Exception as error:
        if settings.transport == "shm":
            code = code_of(error) or WorldCode.NO_SHARED_MEMORY
            raise StartError(coded(code, f"HOROVOD_TRANSPORT=shm is not possible: {error}")) from error
        log.warning("TCP is used instead of shared memory: %s", error)
        return None


def make_listeners(settings: Settings, *, optional: bool) -> Listeners | None:
    """This member's listeners; None when there can't be any and shared memory may be used instead."""
    from horovod.worker.runtime.host import choose_interfaces, interfaces, is_loopback
    from horovod.worker.runtime.mesh import Listeners

    assert settings.coordinator is not None
    try:
        addresses = split_addresses(settings.coordinator, "HOROVOD_COORDINATOR")
        hosts = [split_address(one, "HOROVOD_COORDINATOR")[0] for one in addresses]
        wanted = settings.network_interfaces
        local = not wanted and all(is_loopback(host) for host in hosts)
        ports = split_ports(settings.ports or "") or (0,)
        return Listeners(choose_interfaces(interfaces(), wanted, coordinator_on_loopback=local), ports=ports)
    except StartError:
        if not optional or settings.network_interfaces or settings.ports:
            raise
        log.info("There is no network interface for TCP; only shared memory can be used.", exc_info=True)
        return None


def choose_hierarchy(settings: Settings, world: World) -> list[int]:
    """Which ranks share memory in a world that needs TCP (World.sharing_hosts); all ranks choose alike."""
    if settings.transport == "tcp" or settings.hierarchical_allreduce is False:
        return []
    return world.sharing_hosts()


def engine_options(settings: Settings) -> dict[str, int]:
    """Fields of csrc/base/config.h: those that rows name, and those on which several settings decide."""
    options = {row.engine: int(getattr(settings, row.name) * row.engine_scale) for row in SETTINGS if row.engine}
    options |= gpu_operations(settings)
    options["nccl_streams"] = max(1, settings.num_nccl_streams)
    options["keeps_connections"] = int(settings.min_size is not None)
    options["wire"] = WIRE_MODES.index(settings.wire)
    options["gloo"] = int(settings.cpu_operations == "gloo")
    if options["gloo"] and settings.gloo_timeout_seconds:
        options["progress_timeout_ms"] = settings.gloo_timeout_seconds * 1000
    return options
