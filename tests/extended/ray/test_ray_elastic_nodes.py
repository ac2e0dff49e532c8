"""Elastic executors on nodes of a real Ray that come and die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray_ranks
from ray.cluster_utils import Cluster
from ray_starts import started

from horovod.ray import RayExecutor
from horovod.runner.elastic import driver

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    head = {
        "num_cpus": 1,
        "include_dashboard": False,
        "_system_config": {"health_check_failure_threshold": 1000},  # Ray learns late of a node that is dead
    }
    running = started(lambda: Cluster(initialize_head=True, head_node_args=head))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "DISCOVER_HOSTS_FREQUENCY_SECS", 0.1)
        try:
            ray.init(running.address, log_to_driver=False)
            yield running
        finally:
            ray.shutdown()
            running.shutdown()


def test_a_node_comes_and_dies(cluster: Cluster, tmp_path: Path) -> None:
    """It is killed with its worker: the survivor trains on, while Ray still says that the node is there."""
    stop = tmp_path / "stop"
    nodes: list[Any] = []
    still_there: list[bool] = []

    def act(logged: dict[str, Any]) -> None:
        if not nodes:
            assert logged["size"] == 1
            nodes.append(cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2"))
        elif logged["size"] == 2 and len(nodes) == 1:
            nodes.append(None)
            cluster.remove_node(nodes[0], allow_graceful=False)
        elif logged["size"] == 1 and len(nodes) == 2 and not stop.exists():
            still_there.append(any(one["NodeID"] == nodes[0].node_id and one["alive"] for one in ray.nodes()))
            stop.touch()

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=200), min_workers=1, max_workers=2)
    executor.start()
    seen: list[dict[str, Any]] = []
    try:
        (result,) = executor.run(ray_ranks.train_until, args=[str(stop)], callbacks=[seen.append, act])
    finally:
        executor.shutdown()
    assert (result["rank"], result["size"]) == (0, 1)
    assert [len({one["pid"] for one in seen if one["size"] == size}) for size in (1, 2)] == [1, 2]
    assert {one["pid"] for one in seen if one["size"] == 1} == {result["pid"]}, "the survivor keeps its process"
    assert still_there == [True]
