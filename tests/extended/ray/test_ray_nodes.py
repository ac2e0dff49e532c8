"""RayExecutor on three nodes of a real Ray, from a driver outside of the cluster too, and without one of the nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray
import ray_ranks
from error_codes import ends_with
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError
from ray_starts import started

from benchmarks.ports import free_ports
from horovod.base.errors import LaunchCode, OperationCode
from horovod.ray import RayExecutor

Make = Callable[..., RayExecutor]


def three_nodes() -> tuple[Cluster, int]:
    """With the port for drivers outside of the cluster."""
    port = free_ports(1)[0]
    options = {"include_dashboard": False, "no_monitor": True, "ray_client_server_port": port}
    with ExitStack() as stack:
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 4, **options})
        stack.callback(made.shutdown)
        for _ in range(2):
            made.add_node(num_cpus=2, num_gpus=4)
        stack.pop_all()
        return made, port


@pytest.fixture(scope="module")
def started_cluster() -> Iterator[tuple[Cluster, int]]:
    with pytest.MonkeyPatch.context() as patch:
        # Ray Client's proxy forks to start a server for each driver. gRPC would start its threads again in the child,
        # before the child becomes another program, and sometimes crashes there.
        patch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
        running, port = started(three_nodes)
    try:
        ray.init(running.address, log_to_driver=False)
        yield running, port
    finally:
        ray.shutdown()
        running.shutdown()


@pytest.fixture(scope="module")
def cluster(started_cluster: tuple[Cluster, int]) -> Cluster:
    return started_cluster[0]


@pytest.fixture(scope="module")
def client_port(started_cluster: tuple[Cluster, int]) -> int:
    return started_cluster[1]


def test_hosts_with_two_ranks_each(cluster: Cluster, executor: Make, caplog: pytest.LogCaptureFixture) -> None:
    before = set(os.listdir(tempfile.gettempdir()))
    running = executor(num_hosts=3, num_workers_per_host=2, use_gpu=True, gpus_per_worker=2)
    running.start()
    found = running.run(ray_ranks.place)
    assert [one["rank"] for one in found] == list(range(6))
    assert [one["local"] for one in found] == [(0, 2), (1, 2)] * 3
    assert [one["cross"] for one in found] == [(host, 3) for host in range(3) for _ in range(2)]
    assert {one["sum"] for one in found} == {15.0}
    names = {one["host"] for one in found}
    assert len(names) == 3
    assert all(name.startswith(f"{socket.gethostname()}-") and len(name) < 80 for name in names)
    # The coordinator is known by a certificate, which lies in no folder; and there is nothing to warn of.
    for variables in running.run(ray_ranks.environment):
        assert variables["HOROVOD_TLS_CA"].startswith("/proc/self/fd/")
    # Each sees the GPUs of its node, and its local rank is the number of one of its own.
    chosen = running.run(ray_ranks.gpus)
    assert all(gpu in own and len(own) == 2 for gpu, own in chosen)
    of_nodes = [sorted(first[1] + second[1]) for first, second in zip(chosen[::2], chosen[1::2], strict=True)]
    assert of_nodes == [["0", "1", "2", "3"]] * 3
    made = {*os.listdir(tempfile.gettempdir())} - before
    # A test of Ray Tune that runs beside this one has folders there.
    assert not [name for name in made if name.startswith("horovod-ray-") and not name.startswith("horovod-ray-tune-")]
    assert not caplog.records


def test_more_hosts_than_there_are(cluster: Cluster, executor: Make) -> None:
    running = executor(num_hosts=4, placement_group_timeout_s=0.5)
    with pytest.raises(TimeoutError, match=ends_with(LaunchCode.TOO_FEW_RESOURCES, "4 nodes", "3 of the cluster's 3")):
        running.start()


CLIENT = """
import sys
sys.path[:0] = [sys.argv[2]]
import ray
import ray_ranks
from horovod.ray import RayExecutor

ray.init(sys.argv[1])
ray.cloudpickle.register_pickle_by_value(ray_ranks)
executor = RayExecutor(RayExecutor.create_settings(timeout_s=200), num_workers=2)
executor.start(ray_ranks.Stateful, executable_args=[1])
heard = []
assert [one["rank"] for one in executor.run(ray_ranks.place)] == [0, 1]
assert executor.execute(lambda one: one.advance()) == [4.0, 4.0]
assert executor.execute_single(lambda one: one.count) == 2
assert ray.get(executor.run_remote(lambda value: value, args=[None])) == [None, None]
try:
    executor.run(ray_ranks.until_told, args=[ray_ranks.fail], callbacks=[heard.append])
except ZeroDivisionError as error:
    assert "out of coffee" in str(error)
else:
    raise AssertionError
assert all("begun" in info for info in heard)
try:
    executor.run(ray_ranks.until_told, callbacks=[lambda info: {}["nothing"]])
except KeyError:
    assert executor.run(ray_ranks.place)[0]["sum"] == 1.0
else:
    raise AssertionError
executor.shutdown()
elastic = RayExecutor(RayExecutor.create_settings(timeout_s=200), min_workers=3, max_workers=3, cpus_per_worker=2)
elastic.start()
heard = []
found = elastic.run(ray_ranks.place_and_log, callbacks=[heard.append])
assert [one["local"] for one in found] == [(0, 3), (1, 3), (2, 3)]
assert len(heard) == 3
elastic.shutdown()
try:
    RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=0.5), num_workers=99).start()
except TimeoutError as error:
    assert "99 CPU" in str(error)
else:
    raise AssertionError
print("done")
"""


@pytest.mark.timeout(300)
def test_a_driver_outside_of_the_cluster(cluster: Cluster, client_port: int) -> None:
    address, folder = f"ray://127.0.0.1:{client_port}", str(Path(ray_ranks.__file__).parent)
    done = subprocess.run([sys.executable, "-c", CLIENT, address, folder], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")


def test_a_node_that_dies(cluster: Cluster, executor: Make) -> None:
    """With its ranks: the others hear of it from their connections, before Ray knows."""
    running = executor(num_hosts=3)
    running.start()
    victim = ray.get(running.adapter.workers[2].node_id.remote())
    node = next(one for one in cluster.list_all_nodes() if one.node_id == victim)
    if node is cluster.head_node:
        victim = ray.get(running.adapter.workers[1].node_id.remote())
        node = next(one for one in cluster.list_all_nodes() if one.node_id == victim)
    assert {one["sum"] for one in running.run(ray_ranks.place)} == {3.0}  # all are in the world
    refs = running.run_remote(ray_ranks.until_told)
    cluster.remove_node(node, allow_graceful=False)
    ended = [one for one in (_outcome(ref) for ref in refs) if one is not None]
    assert len(ended) == 2
    assert all(f"[{OperationCode.PEER_LOST}]" in sentence for sentence in ended)
    with pytest.raises(RayActorError):
        running.run(ray_ranks.place)


def _outcome(ref: Any) -> str | None:
    """What the rank was told; None where it was lost."""
    try:
        return str(ray.get(ref))
    except RayActorError:
        return None
