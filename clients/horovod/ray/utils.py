"""Small helpers that programs on Ray import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray

from horovod.base.settings import variables


def detect_nics(settings: Any, all_host_names: Sequence[str], node_workers: Sequence[Any] | None = None) -> list[str]:
    """The network interfaces that the settings name; none where members are to find out themselves, as they do."""
    return sorted(settings.nics or ())


def nics_to_env_var(nics: Iterable[str]) -> dict[str, str]:
    """The variables that name these interfaces to members; none for no interface."""
    names = tuple(nics)
    return {**variables(network_interfaces=names), "NCCL_SOCKET_IFNAME": ",".join(names)} if names else {}


def map_blocking(fn: Callable[[Any], Any], workers: Iterable[Any]) -> list[Any]:
    """The results of `worker.execute.remote(fn)`, of all workers, in their order."""
    return list(ray.get([worker.execute.remote(fn) for worker in workers]))
