"""Where a fixed number of actors is placed: in one placement group, whose resources are there before the first of them
starts; and which resources a group lacks, in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovod.base.errors import LaunchCode, coded
from horovod.ray.adapter import BaseParams

Resources = Mapping[str, float]


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
        place = PlacementGroupSchedulingStrategy(
            self.placement_group, bundle, placement_group_capture_child_tasks=False
        )
        return self._params.actor(rank, self.num_workers, place)

    def shutdown(self) -> None:
        """Removes the placement group, which kills the actors in it. A group that the caller made stays."""
        if self._created_placement_group:
            self._created_placement_group = False
            remove_placement_group(self.placement_group)


class PGStrategy(_Strategy):
    """Places `num_workers` on as few nodes as possible; within the caller's placement group if there is one."""

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
    """Places workers on `num_hosts` hosts, `num_workers_per_host` on each."""

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


def missing(bundle: Resources, count: int, spread: bool, nodes: Sequence[Resources], free: Resources) -> str:
    """Completes "The resources were not there: ".

    bundle: the resources that are needed `count` times, with `spread` on as many nodes. nodes: all resources of each
    node of the cluster. free: the resources of the whole cluster that nobody uses.
    """
    if spread:
        large = sum(all(node.get(name, 0) >= amount for name, amount in bundle.items()) for node in nodes)
        if large < count:
            return (
                f"the job needs {count} nodes with {in_words(bundle)} each, and {large} of the cluster's {len(nodes)} "
                f"{'has' if large == 1 else 'have'} that"
            )
    needed = {name: amount * count for name, amount in bundle.items()}
    total = {name: sum(node.get(name, 0) for node in nodes) for name in needed}
    if short := {name: needed[name] - total[name] for name in needed if needed[name] > total[name]}:
        return f"the job needs {in_words(needed)}, and the cluster has {in_words(total)}: {in_words(short)} missing"
    there = {name: free.get(name, 0) for name in needed}
    if short := {name: needed[name] - there[name] for name in needed if needed[name] > there[name]}:
        there_now, used = in_words(there), in_words(short)
        return f"the job needs {in_words(needed)}, and the cluster has {there_now} free: others use {used} of that"
    return f"the job needs {in_words(needed)}, as {count} x {in_words(bundle)}, and no placement on the nodes has that"


def in_words(resources: Resources) -> str:
    """The resources as a text like "2 CPU and 1 GPU"."""
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())
