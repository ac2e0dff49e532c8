"""How long an elastic job on Ray is without a step when one of its actors is killed, or a node (benchmarks/ray.py).

The actors take steps without a framework: an allreduce of one number and a commit. Each is on a host of its own, which
is invented: Ray places it by a resource "node:<host>". By turns an actor gets SIGKILL, and the times go from just
before kill(2) to the end of the first step

    survivors     of the world without it, on the survivor that ends it last; with --spares a spare is in its place
    replaced      of the first world that has another process, which Ray starts meanwhile

A node is killed with its actor and its raylet; --nodes says how often. "ray.nodes() says" is what Ray knew of it then.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.cluster_utils import Cluster

from horovod.ray import RayExecutor
from horovod.runner.elastic import driver
from horovod.runner.elastic.discovery import FixedHosts

START_S = 120.0


def figures(size: int, kills: int, spares: int, nodes: int) -> dict[str, list[float]]:
    """Seconds of each kill, by the names above."""
    found = actors_killed(size, kills, spares) if kills else {}
    for _ in range(nodes):
        for name, seconds in node_killed().items():
            found.setdefault(name, []).append(seconds)
    return found


def actors_killed(size: int, kills: int, spares: int = 0) -> dict[str, list[float]]:
    """The times of each kill, in seconds. Starts a Ray of its own."""
    hosts = [f"host-{number}" for number in range(size + spares + kills)]
    ray.init(
        "local",
        num_cpus=len(hosts),
        resources={f"node:{host}": 1.0 for host in hosts},
        include_dashboard=False,
        log_to_driver=False,
    )
    times: dict[str, list[float]] = {"survivors after a killed actor": [], "replaced": []}
    worlds = Worlds()
    killed_s, killed_in, left, victim = 0.0, 0, kills, 0

    def act(stop: Callable[[], None]) -> None:
        nonlocal killed_s, killed_in, left, victim
        world = worlds.latest_whole()
        if world is None or world.epoch <= killed_in:
            return
        if killed_s and len(times["replaced"]) == len(times["survivors after a killed actor"]):
            times["survivors after a killed actor"].append(world.last_s - killed_s)
        if world.size < size:
            return
        if killed_s:
            times["replaced"].append(world.last_s - killed_s)
        if not left:
            stop()
            return
        killed_in, left, victim = world.epoch, left - 1, victim + 1
        killed_s = time.monotonic()
        os.kill(world.pids[victim % size], signal.SIGKILL)

    settings = RayExecutor.create_settings(timeout_s=START_S)
    settings.discovery = FixedHosts(dict.fromkeys(hosts, 1))  # type: ignore[attr-defined]
    executor = RayExecutor(
        settings, min_workers=size - 1 or 1, max_workers=size, override_discovery=False, spares=spares
    )
    try:
        _train(executor, worlds, act)
    finally:
        ray.shutdown()
    return times


def node_killed() -> dict[str, float]:
    """The times of one node that is killed, in seconds. Starts a cluster of its own."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(cluster.address, log_to_driver=False)  # first, or the driver could be on the node that dies
    node = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")
    worlds = Worlds()
    killed_s, found = 0.0, {}

    def act(stop: Callable[[], None]) -> None:
        nonlocal killed_s
        world = worlds.latest_whole()
        if world is not None and world.size == 2 and not killed_s:
            killed_s = time.monotonic()
            cluster.remove_node(node, allow_graceful=False)
        elif world is not None and world.size == 1 and killed_s and not found:
            alive = any(one["NodeID"] == node.node_id and one["alive"] for one in ray.nodes())
            print(f"ray.nodes() says that the killed node is {'alive' if alive else 'dead'}")
            found["survivors after a killed node"] = world.last_s - killed_s
            stop()

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=START_S), min_workers=1, max_workers=2)
    try:
        _train(executor, worlds, act)
    finally:
        ray.shutdown()
        cluster.shutdown()
    return found


class World:
    """What the ranks of one world have said of their first step in it."""

    def __init__(self, epoch: int, size: int) -> None:
        self.epoch, self.size = epoch, size
        self.pids: dict[int, int] = {}
        self.last_s = 0.0


class Worlds:
    def __init__(self) -> None:
        self._all: dict[int, World] = {}

    def take(self, said: dict[str, Any]) -> None:
        world = self._all.setdefault(said["epoch"], World(said["epoch"], said["size"]))
        world.pids[said["rank"]] = said["pid"]
        world.last_s = max(world.last_s, said["at_s"])

    def latest_whole(self) -> World | None:
        """The latest of which all ranks have taken a step."""
        whole = [world for world in self._all.values() if len(world.pids) == world.size]
        return max(whole, key=lambda world: world.epoch, default=None)


def _train(executor: RayExecutor, worlds: Worlds, act: Callable[[Callable[[], None]], None]) -> None:
    driver.DISCOVER_HOSTS_FREQUENCY_SECS = 0.1
    with tempfile.TemporaryDirectory() as folder:
        stop = os.path.join(folder, "stop")

        def heard(said: dict[str, Any]) -> None:
            worlds.take(said)
            act(lambda: open(stop, "w").close())

        executor.start()
        try:
            executor.run(steps, args=[stop], callbacks=[heard])
        finally:
            executor.shutdown()


def steps(stop: str) -> None:
    """On each rank: says when the first step of each world has ended."""
    from array import array

    from horovod._core import OpSpec
    from horovod.common import basics as hvd
    from horovod.common.elastic import ObjectState, run_fn
    from horovod.common.ops.objects import broadcast_object
    from horovod.common.process_sets import global_process_set
    from horovod.ray import ray_logger
    from horovod.worker.runtime.context import current

    hvd.init()
    state = ObjectState(
        lambda value, root_rank=0: broadcast_object(value, root_rank, None, global_process_set), hvd.rank
    )
    last = 0

    def train(state: ObjectState) -> None:
        nonlocal last
        is_over = array("f", [0.0])
        while not is_over[0]:
            is_over[0] = float(os.path.exists(stop))
            pointer = is_over.buffer_info()[0]
            current().engine.submit(OpSpec(0), "allreduce.over", [(pointer, pointer, 7, (1,))]).result()
            at_s, epoch = time.monotonic(), current().world.epoch
            if epoch != last:
                last = epoch
                said = {"rank": hvd.rank(), "size": hvd.size(), "pid": os.getpid(), "epoch": epoch, "at_s": at_s}
                ray_logger.log(said)
            state.commit()

    run_fn(train, hvd.join_again)(state)
