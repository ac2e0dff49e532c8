"""Where the actors are placed: in one placement group, whose resources are there before the first of them starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovod.base.errors import LaunchCode, coded
from horovod.ray.adapter import BaseParams
from horovod.ray.resources import missing
from horovod.ray.worker import BaseHorovodWorker


def create_placement_group(
    resources_per_bundle: Mapping[str, float],
    num_bundles: int,
    pg_timeout: float,
    pg_strategy: str,
    labels: Mapping[str, str] | None = None,
) -> tuple[Any, list[dict[str, float]]]:
    """A placement group whose resources are there, and its bundles.

    TimeoutError after `pg_timeout` seconds, with what is missing; the group is then removed. labels: of the nodes.
    """
    bundles = [dict(resources_per_bundle) for _ in range(num_bundles)]
    there = {"bundle_label_selector": [dict(labels)] * num_bundles} if labels else {}
    group = placement_group(bundles, strategy=pg_strategy, **there)
    ready = False
    try:
        ready = group.wait(pg_timeout)
    finally:
        if not ready:
            remove_placement_group(group)
    if not ready:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        why = missing(
            resources_per_bundle, num_bundles, pg_strategy == "STRICT_SPREAD", nodes, ray.available_resources()
        )
        if labels:
            why += f" (on nodes with the labels {', '.join(f'{name}={value}' for name, value in labels.items())})"
        raise TimeoutError(
            coded(
                LaunchCode.TOO_FEW_RESOURCES,
                f"Ray had no place for the workers within {pg_timeout:g} s: {why}. Ask for less, add nodes, or give an "
                "autoscaler more time (placement_group_timeout_s of create_settings()).",
            )
        )
    return group, bundles


class _Strategy:
    """Actors in one placement group."""

    def __init__(self, num_workers: int, params: BaseParams, labels: Mapping[str, str] | None = None) -> None:
        self.placement_group: Any = None
        self.num_workers = num_workers
        self._created_placement_group = False
        self._params = params
        self._labels = labels

    def create_workers(self) -> list[Any]:
        """The actors in the order in which they were placed; they may still be starting."""
        raise NotImplementedError

    def _create(self, timeout_s: float, count: int, workers: int, pg_strategy: str) -> None:
        """A group of `count` bundles with resources for so many workers each."""
        bundle = self._params.bundle(workers)
        self.placement_group, _ = create_placement_group(bundle, count, timeout_s, pg_strategy, self._labels)
        self._created_placement_group = True

    def _actor(self, rank: int, bundle: int) -> Any:
        options = self._params.actor_options()
        place = PlacementGroupSchedulingStrategy(
            self.placement_group, bundle, placement_group_capture_child_tasks=False
        )
        actor = ray.remote(BaseHorovodWorker).options(scheduling_strategy=place, **options)
        return actor.remote(world_rank=rank, world_size=self.num_workers)

    def shutdown(self) -> None:
        """Removes the placement group, which kills the actors in it. A group that the caller made stays."""
        if self._created_placement_group:
            self._created_placement_group = False
            remove_placement_group(self.placement_group)


class PGStrategy(_Strategy):
    """So many workers, on as few nodes as possible; within the caller's placement group if there is one."""

    def __init__(
        self,
        settings: Any,
        num_workers: int,
        params: BaseParams,
        use_current_placement_group: bool,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(num_workers, params, labels)
        self._timeout_s = settings.placement_group_timeout_s
        self._use_current = use_current_placement_group

    def create_workers(self) -> list[Any]:
        self.placement_group = get_current_placement_group() if self._use_current else None
        if self.placement_group is not None and self._labels:
            sentence = (
                "label_selector is given, and start() was called in a placement group, whose nodes Ray has chosen "
                "already. use_current_placement_group=False makes another group."
            )
            raise ValueError(coded(LaunchCode.CONFLICTING_OPTIONS, sentence))
        bundles = [-1] * self.num_workers  # any bundle of the group
        if self.placement_group is None:
            self._create(self._timeout_s, self.num_workers, 1, "PACK")
            bundles = list(range(self.num_workers))
        return [self._actor(rank, bundle) for rank, bundle in enumerate(bundles)]


class ColocatedStrategy(_Strategy):
    """So many hosts, with as many workers on each."""

    def __init__(
        self,
        settings: Any,
        num_hosts: int,
        num_workers_per_host: int,
        params: BaseParams,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(num_hosts * num_workers_per_host, params, labels)
        self._timeout_s = settings.placement_group_timeout_s
        self._hosts, self._per_host = num_hosts, num_workers_per_host

    def create_workers(self) -> list[Any]:
        self._create(self._timeout_s, self._hosts, self._per_host, "STRICT_SPREAD")
        return [self._actor(rank, rank // self._per_host) for rank in range(self.num_workers)]
